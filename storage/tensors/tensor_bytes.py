"""A safetensors file as bytes: its header, and each tensor as words of its width, whatever the dtype.

Owns the layout of the format and the digest of tensors. Needs no torch: NumPy knows no bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from os import SEEK_END
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

METADATA = "__metadata__"

_LONGEST_HEADER = 100_000_000
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the header describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """First byte and end in the data behind the header."""


_ENTRIES = TypeAdapter(dict[str, Entry])
_TEXTS = TypeAdapter(dict[str, str])


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, str]
    entries: dict[str, Entry]

    @property
    def data_bytes(self) -> int:
        return max((entry.data_offsets[1] for entry in self.entries.values()), default=0)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def encode(self) -> bytes:
        """The header as it stands in a file. Equal headers give equal bytes."""
        content = {METADATA: dict(sorted(self.metadata.items()))}
        content |= {name: asdict(entry) for name, entry in self.entries.items()}
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


Shapes = Mapping[str, Sequence[int]]


def find_difference(got: Shapes, expected: Shapes) -> str | None:
    """In which names or shapes of tensors these differ, in words; None if in none."""
    if missing := sorted(expected.keys() - got.keys()):
        return f"{missing[0]!r} is missing ({len(missing)} tensors missing)"
    if unknown := sorted(got.keys() - expected.keys()):
        return f"{unknown[0]!r} does not belong to this model ({len(unknown)} tensors)"
    for name, shape in got.items():
        if [*shape] != [*expected[name]]:
            return f"{name!r} has shape {[*shape]}; expected {[*expected[name]]}"
    return None


def read_header(uri: str, file: BinaryIO) -> Header:
    """Header of a safetensors file, read up to its data. Raises ValueError, naming the file, if it is
    none."""
    length = int.from_bytes(file.read(8), "little")
    header = _parse_header(uri, file.read(min(length, _LONGEST_HEADER)), length)
    begin = file.tell()
    _check_size(uri, header, file.seek(0, SEEK_END) - begin)
    file.seek(begin)
    return header


def _parse_header(uri: str, text: bytes, length: int) -> Header:
    """`text`: the JSON of the header, which should have this length."""
    if len(text) != length:
        raise _broken(uri, "the header is cut off")
    try:
        content = json.loads(text)
        metadata = _TEXTS.validate_python(content.pop(METADATA, {}))
        entries = _ENTRIES.validate_python(content)
    # deep nesting, no object, no JSON, or other fields
    except (RecursionError, AttributeError, ValueError):
        raise _broken(uri, "the header describes no tensors") from None
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if min((begin, *entry.shape)) < 0 or end < begin or (end == begin) != (0 in entry.shape):
            raise _broken(uri, f"tensor {name!r} has an impossible place or shape")
    return Header(metadata, entries)


class Tensors(Protocol):
    """Tensors as a safetensors file holds them, or would."""

    header: Header

    def words(self, name: str) -> npt.NDArray[Any]:
        """The elements of a tensor as unsigned integers of their width; single bytes if no integer has it."""
        ...

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and the SHA-256 of every tensor, wherever in a file they lie."""

        def digest_one(name: str) -> str:
            return hashlib.sha256(self.words(name).data).hexdigest()

        names = sorted(self.header.entries)
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(digest_one, names))
        content = []
        for name, digest in zip(names, digests, strict=True):
            entry = self.header.entries[name]
            content.append([name, entry.dtype, entry.shape, digest])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class TensorBytes(Tensors):
    """The tensors of a safetensors file, over bytes that may be writable. Raises ValueError, which names the
    file, if these are not all there."""

    def __init__(self, uri: str, header: Header, data: bytes | memoryview) -> None:
        _check_size(uri, header, len(data))
        self.header = header
        self._data: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)

    @property
    def data(self) -> memoryview:
        """What stands behind the header."""
        return self._data.data

    def words(self, name: str) -> npt.NDArray[Any]:
        entry = self.header.entries[name]
        return as_words(entry, self._data[slice(*entry.data_offsets)])


def as_words(entry: Entry, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The bytes of a tensor as `Tensors.words`."""
    width, rest = divmod(data.size, max(1, math.prod(entry.shape)))
    return data.view(f"<u{width}" if not rest and width in (2, 4, 8) else "u1")


def pack(tensors: Tensors) -> TensorBytes:
    """A copy of the tensors, each read once, as the bytes of one file."""
    copy = TensorBytes("tensors", tensors.header, memoryview(bytearray(tensors.header.data_bytes)))
    for name in tensors.header.entries:
        copy.words(name)[:] = tensors.words(name)
    return copy


def parse(uri: str, content: bytes | memoryview) -> TensorBytes:
    """The tensors of a whole file. Raises ValueError, naming the file, if it is no complete one."""
    view = memoryview(content)
    length = int.from_bytes(view[:8], "little")
    header = _parse_header(uri, bytes(view[8 : 8 + min(length, _LONGEST_HEADER)]), length)
    return TensorBytes(uri, header, view[8 + length :])


def pack_bytes(uri: str, tensors: Mapping[str, bytes], metadata: dict[str, str]) -> TensorBytes:
    """A file of these byte strings."""
    entries = {}
    end = 0
    for name, value in tensors.items():
        begin = end
        end = end + len(value)
        entries[name] = Entry("U8", (len(value),), (begin, end))
    return TensorBytes(uri, Header(metadata, entries), b"".join(tensors.values()))


def _check_size(uri: str, header: Header, num_bytes: int) -> None:
    if num_bytes != header.data_bytes:
        raise _broken(
            uri, (f"the file has {num_bytes} bytes of data, but its header names {header.data_bytes}")
        )


def _broken(uri: str, why: str) -> ValueError:
    return ValueError(f"{uri}: not a complete safetensors file: {why}")
