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

OF_A_VERSION = ("version", DIGEST)
"""Metadata that a delta would leave wrong."""


@dataclass
class _Copy:
    place: tempfile.TemporaryDirectory[str]
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
        self._held: _Copy | None = None
        self._turn = threading.Lock()
        self._is_closed = False

    @property
    def version(self) -> int | None:
        """The version that was fetched last."""
        return None if self._held is None else self._held.version

    def fetch(self, weights: WeightsRef) -> str:
        """Have these weights, verified, in the folder, which is returned. They stay until the next fetch,
        which may change the file in place: whatever an engine goes on using, it must have copied.

        Raises ValueError, which names the file, if they are damaged or not there, and StorageError if they
        cannot be read; the weights from before then stay."""
        try:
            with self._turn:
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
        self._refuse_closed()
        header, pieces = open_weights(weights.uri)
        wanted = header.metadata.get(DIGEST)
        if wanted is None or not (
            self._reaches(weights, wanted) or self._takes_shared(weights, header, wanted)
        ):
            self._hold(weights, header, pieces)

    def _reaches(self, weights: WeightsRef, wanted: str) -> bool:
        """Whether the copy has become these weights without reading them whole."""
        held = self._held
        if held is None or held.digest is None:
            return False
        if held.digest == wanted:
            held.version = weights.version
        elif held.version == weights.version - 1:
            try:
                delta = load_delta(weights.uri)
                if delta is None:
                    return False
                before = held.digest
                held.digest = None
                delta.apply(held.tensors, before, wanted)
            except ValueError as error:
                log.warning("%s; all of the weights are read instead", error)
                return False
            held.version = weights.version
            held.digest = wanted
        return held.digest == wanted

    def _takes_shared(self, weights: WeightsRef, header: Header, wanted: str) -> bool:
        """Whether the copy has become these weights by those that a trainer on this host shares."""
        if (path := shared_memory.find(wanted)) is None:
            return False
        try:
            with open(path, "rb") as file:
                self._hold(weights, header, pieces(file))
        # the trainer has the next version meanwhile, or its memory is damaged
        except (OSError, ValueError) as error:
            log.warning("%s: %s; the weights are read from storage instead", path, error)
            return False
        return True

    def _hold(self, weights: WeightsRef, header: Header, pieces: Iterable[bytes | memoryview]) -> None:
        """Have a verified copy of these tensors in the folder. If it is refused, the one before stays."""
        uri = join(weights.uri, FILE_NAME)
        metadata = {key: value for key, value in header.metadata.items() if key not in OF_A_VERSION}
        front = Header(metadata, header.entries).encode()
        place = _room_for(len(front) + header.data_bytes, uri)
        try:
            path = join(place.name, FILE_NAME)
            with open(path, "r+b") as file:
                for piece in chain([front], pieces):
                    self._refuse_closed()
                    file.write(piece)
                file.flush()
                tensors = parse(uri, memoryview(mmap.mmap(file.fileno(), 0)))
            digest = tensors.digest()
            if header.metadata.get(DIGEST, digest) != digest:
                raise ValueError(f"{uri}: the tensors differ from those that were written")
            self._show(path)
        except BaseException:
            place.cleanup()
            raise
        before = self._held
        self._held = _Copy(place, tensors, weights.version, digest)
        if before is not None:
            before.place.cleanup()

    def _show(self, path: str) -> None:
        """Have the folder's file be this one, in one step."""
        new = join(self.folder, f".{FILE_NAME}")
        os.symlink(path, new)
        os.replace(new, join(self.folder, FILE_NAME))

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the copy of the weights on this host is closed")

    def _remove(self) -> None:
        """Remove everything, unless a fetch is going on, which does it when it ends."""
        if self._turn.acquire(blocking=False):
            try:
                for place in (self._links, *([self._held.place] if self._held else [])):
                    place.cleanup()
                self._held = None
            finally:
                self._turn.release()


def _room_for(num_bytes: int, uri: str) -> tempfile.TemporaryDirectory[str]:
    """A folder with a file of this size, in shared memory if that has room for it. In containers it often has
    none."""
    for root in (shared_memory.PLACE, tempfile.gettempdir()):
        with suppress(OSError):
            return shared_memory.make_room(FILE_NAME, num_bytes, root)
    needed = f"{num_bytes / 2**20:,.0f} MiB"
    raise StorageError(f"{uri}: neither {shared_memory.PLACE} nor TMPDIR ({root}) has {needed} of free space")
