"""Deltas: delta.safetensors beside model.safetensors, the elements that changed since the version before.

Owns what is in the file. Whoever has no use for a delta takes model.safetensors, which is always there.

The file has a byte string for every tensor that changed, under the tensor's name. Positions are the numbers
of unchanged elements before each changed one: bytes of 255 count on, any other byte ends the number. Values
are the new ones, in a plane for every byte of an element. Each of these is compressed by itself (zstd), and
their lengths stand in front as 64-bit integers: that of the positions before compression, then each part's.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, Field, ValidationError

from storage import files
from storage.files import FileRef
from storage.json_files import first_fault
from storage.tensors.tensor_bytes import Header, TensorBytes, pack_bytes, parse
from storage.tensors.weights import DIGEST, open_weights, save_packed

FILE_NAME = "delta.safetensors"

_LARGEST = 0.5
"""Largest share of the full tensors for which a delta is worth its way."""

_NO_CHECKSUM = "0" * 64
_SHA256 = r"^[0-9a-f]{64}$"

Words = npt.NDArray[Any]
"""Elements as unsigned integers."""


class _About(BaseModel):
    """The metadata of the file."""

    format: Literal["gaps-1"]
    base: int
    """The version that the delta changes."""
    version: int
    base_digest: str = Field(pattern=_SHA256)
    digest: str = Field(pattern=_SHA256)
    checksum: str = Field(pattern=_SHA256)
    """SHA-256 of the file with zeros in this place."""


def save_delta(folder: str, base: TensorBytes | None, new: TensorBytes, version: int) -> FileRef | None:
    """Write the delta from the version before, if that is known and it is worth it; else the folder has
    none."""
    uri = files.join(folder, FILE_NAME)
    delta = None if base is None else encode(base, new, version)
    if delta is None:
        files.remove(uri)  # of another try at this version
        return None
    return save_packed(uri, delta)


def load_delta(folder: str) -> Delta | None:
    """The delta of a version, None if it has none. Raises ValueError, naming the file, if it is damaged."""
    uri = files.join(folder, FILE_NAME)
    content = files.read_if_there(uri)
    return None if content is None else Delta(uri, content)


def open_base(folder: str, new: TensorBytes) -> TensorBytes | None:
    """The stored tensors of a version, if they are there and a delta from them to `new` is possible."""
    try:
        header, pieces = open_weights(folder)
        if _layout(header) != _layout(new.header):
            return None
        data = bytearray()
        for piece in pieces:
            data += piece
        return TensorBytes(folder, header, memoryview(data))
    except (FileNotFoundError, ValueError):
        return None


def encode(base: TensorBytes, new: TensorBytes, version: int) -> TensorBytes | None:
    """The delta that makes `new`, which is this version, of `base`, the one before. None if it is more than
    half as large as the tensors, or these have other names, shapes or dtypes."""
    if _layout(base.header) != _layout(new.header):
        return None
    parts: dict[str, bytes] = {}
    room = int(_LARGEST * new.header.data_bytes)
    for name in new.header.entries:
        before = base.words(name)
        after = new.words(name)
        changed = np.flatnonzero(before != after)
        if changed.size:
            parts[name] = _pack(changed, after[changed])
            room -= len(parts[name])
        if room < 0:
            return None
    about = {
        "format": "gaps-1",
        "base": str(version - 1),
        "version": str(version),
        "base_digest": base.header.metadata.get(DIGEST) or base.digest(),
        "digest": new.header.metadata.get(DIGEST) or new.digest(),
        "checksum": _NO_CHECKSUM,
    }
    delta = pack_bytes(FILE_NAME, parts, about)
    about["checksum"] = _checksum(delta)
    return delta


class Delta:
    """A delta as it was read. Raises ValueError, which names the file, if it is damaged."""

    def __init__(self, uri: str, content: bytes) -> None:
        self._uri = uri
        self._parts = parse(uri, content)
        try:
            self._about = about = _About.model_validate(self._parts.header.metadata)
        except ValidationError as error:
            raise ValueError(f"{uri}: not a delta: {first_fault(error)}") from None
        self._parts.header.metadata["checksum"] = _NO_CHECKSUM
        num_bytes = len(self._parts.header.encode()) + len(self._parts.data)
        if about.checksum != _checksum(self._parts) or len(content) != num_bytes:
            raise ValueError(f"{uri}: the content differs from what was written")

    def apply(self, tensors: TensorBytes, before: str, after: str) -> None:
        """Change tensors with the digest `before` into those with the digest `after`, in place. Raises
        ValueError if the delta does not lead there, and then changes nothing, or if something else came
        out."""
        about = self._about
        if (before, after) != (about.base_digest, about.digest):
            raise ValueError(
                f"{self._uri}: the delta leads from version {about.base} to version {about.version}, but the "
                "digest of one of these versions differs from the digest in the delta"
            )
        for name in self._parts.header.entries:
            if name not in tensors.header.entries:
                raise ValueError(f"{self._uri}: the delta changes {name!r}, which these weights lack")
            try:
                _scatter(self._parts.words(name), tensors.words(name))
            # OSError: pyarrow's word for data that it cannot decompress
            except (OSError, ValueError, IndexError) as error:
                raise ValueError(f"{self._uri}: {name!r} cannot be applied: {error}") from None
        if tensors.digest() != after:
            raise ValueError(f"{self._uri}: the delta did not give the weights of version {about.version}")


def _layout(header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}


def _pack(positions: npt.NDArray[np.int64], values: Words) -> bytes:
    """The byte string of one tensor."""
    gaps = np.diff(positions, prepend=-1) - 1
    last = np.cumsum(gaps // 255 + 1) - 1
    counted = np.full(last[-1] + 1, 255, np.uint8)
    counted[last] = gaps % 255
    planes = values.view(np.uint8).reshape(values.size, -1).T
    codec = pa.Codec("zstd", 1)
    parts = [codec.compress(part.tobytes(), asbytes=True) for part in (counted, *planes)]
    lengths = np.array([counted.size, *map(len, parts)], "<u8")
    return lengths.tobytes() + b"".join(parts)


def _scatter(packed: Words, target: Words) -> None:
    """Put the values of a byte string into a tensor. Raises ValueError or OSError if it is none."""
    width = target.itemsize
    front = 8 * (width + 2)
    if packed.size < front:
        raise ValueError("the part of the delta is too short")
    counted_size, *lengths = packed[:front].view("<u8").tolist()
    if front + sum(lengths) != packed.size or counted_size > target.size:
        raise ValueError("the lengths in this part of the delta do not match its size")
    codec = pa.Codec("zstd", 1)
    ends = front + np.cumsum([0, *lengths])
    parts = [packed[begin:end].data for begin, end in pairwise(ends)]
    counted = np.frombuffer(codec.decompress(parts[0], counted_size), np.uint8)
    is_end = counted != 255
    positions = np.cumsum(counted, dtype=np.int64)[is_end]
    positions += np.arange(positions.size)
    planes = [np.frombuffer(codec.decompress(part, positions.size), np.uint8) for part in parts[1:]]
    target[positions] = np.stack(planes, axis=1).reshape(-1).view(target.dtype)


def _checksum(delta: TensorBytes) -> str:
    content = hashlib.sha256(delta.header.encode())
    content.update(delta.data)
    return content.hexdigest()
