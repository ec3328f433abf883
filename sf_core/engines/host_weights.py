"""The weights that this process's engine takes, as one file in memory that engines load from.

Owns where that file is and how it becomes the next version. Knows no engine.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from sf_core.types import WeightsRef
from storage.errors import StorageError
from storage.files import join, pieces
from storage.scratch import scratch_folder
from storage.tensors import shared_memory
from storage.tensors.tensor_bytes import Header, TensorBytes, parse
from storage.tensors.weight_delta import load_delta
from storage.tensors.weights import DIGEST, FILE_NAME, open_weights

log = logging.getLogger(__name__)

VERSION_METADATA = ("version", DIGEST)
"""Metadata that a delta does not update."""


@dataclass
class _HostCopy:
    file_folder: tempfile.TemporaryDirectory[str]
    """Holds the file alone, and goes with it."""
    tensors: TensorBytes
    """The file, mapped."""
    version: int
    digest: str | None
    """None if the file may hold anything."""


class HostWeights:
    """One copy of a policy's newest weights under Hugging Face names, which may be closed in any thread."""

    def __init__(self) -> None:
        self._links = scratch_folder()
        self.folder = self._links.name
        """Holds model.safetensors of the version that was fetched last. Other files in it are left alone."""
        self._current: _HostCopy | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def version(self) -> int | None:
        """The version that was fetched last."""
        return None if self._current is None else self._current.version

    def fetch(self, weights: WeightsRef) -> str:
        """Store these weights, verified, in the folder, which is returned. They stay until the next fetch,
        which may change the file in place: whatever an engine goes on using, it must have copied.

        Raises ValueError, which names the file, if they are damaged or not there, and StorageError if they
        cannot be read; the weights from before then stay."""
        try:
            with self._lock:
                self._fetch(weights)
                return self.folder
        finally:
            if self._is_closed:
                self._remove()

    def close(self) -> None:
        """Remove the copy; a fetch that is going on in another thread ends with RuntimeError."""
        self._is_closed = True
        self._remove()

    def _fetch(self, weights: WeightsRef) -> None:
        self._check_open()
        header, pieces = open_weights(weights.uri)
        digest = header.metadata.get(DIGEST)
        if digest is not None:
            if self._update_in_place(weights, digest):
                return
            if self._copy_shared(weights, header, digest):
                return
        self._copy_verified(weights, header, pieces)

    def _update_in_place(self, weights: WeightsRef, digest: str) -> bool:
        """Make the copy these weights without reading them whole. Returns whether it could."""
        current = self._current
        if current is None or current.digest is None:
            return False
        if current.digest == digest:
            current.version = weights.version
        elif current.version == weights.version - 1:
            try:
                delta = load_delta(weights.uri)
                if delta is None:
                    return False
                before = current.digest
                current.digest = None
                delta.apply(current.tensors, before, digest)
            except ValueError as error:
                log.warning("%s; all of the weights are read instead", error)
                return False
            current.version = weights.version
            current.digest = digest
        return current.digest == digest

    def _copy_shared(self, weights: WeightsRef, header: Header, digest: str) -> bool:
        """Copy these weights from a trainer on this host that shares them. Returns whether one does."""
        if (path := shared_memory.find(digest)) is None:
            return False
        try:
            with open(path, "rb") as file:
                self._copy_verified(weights, header, pieces(file))
        # the trainer may have replaced the weights by the next version, or its memory is damaged
        except (OSError, ValueError) as error:
            log.warning("%s: %s; the weights are read from storage instead", path, error)
            return False
        return True

    def _copy_verified(
        self, weights: WeightsRef, header: Header, pieces: Iterable[bytes | memoryview]
    ) -> None:
        """Store a verified copy of these tensors in the folder. If it is refused, the one before stays."""
        uri = join(weights.uri, FILE_NAME)
        metadata = {key: value for key, value in header.metadata.items() if key not in VERSION_METADATA}
        header_bytes = Header(metadata, header.entries).encode()
        file_folder = _allocate_file(len(header_bytes) + header.data_bytes, uri)
        try:
            path = join(file_folder.name, FILE_NAME)
            with open(path, "r+b") as file:
                for piece in chain([header_bytes], pieces):
                    self._check_open()
                    file.write(piece)
                file.flush()
                tensors = parse(uri, memoryview(mmap.mmap(file.fileno(), 0)))
            digest = tensors.digest()
            if header.metadata.get(DIGEST, digest) != digest:
                raise ValueError(f"{uri}: the tensors differ from those that were written")
            self._link(path)
        except BaseException:
            file_folder.cleanup()
            raise
        before = self._current
        self._current = _HostCopy(file_folder, tensors, weights.version, digest)
        if before is not None:
            before.file_folder.cleanup()

    def _link(self, path: str) -> None:
        """Make the folder's file a link to this one, atomically."""
        new = join(self.folder, f".{FILE_NAME}")
        os.symlink(path, new)
        os.replace(new, join(self.folder, FILE_NAME))

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the copy of the weights on this host is closed")

    def _remove(self) -> None:
        """Remove everything, unless a fetch is going on, which does it when it ends."""
        if self._lock.acquire(blocking=False):
            try:
                self._links.cleanup()
                if self._current is not None:
                    self._current.file_folder.cleanup()
                self._current = None
            finally:
                self._lock.release()


def _allocate_file(num_bytes: int, uri: str) -> tempfile.TemporaryDirectory[str]:
    """A folder with a file of this size, in shared memory if that has room for it. In containers it often has
    none."""
    for root in (shared_memory.SHARED_MEMORY_FOLDER, tempfile.gettempdir()):
        with suppress(OSError):
            return shared_memory.make_room(FILE_NAME, num_bytes, root)
    needed = f"{num_bytes / 2**20:,.0f} MiB"
    raise StorageError(
        f"{uri}: neither {shared_memory.SHARED_MEMORY_FOLDER} nor TMPDIR ({root}) has {needed} of free space"
    )
