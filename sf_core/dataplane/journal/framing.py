"""How records follow each other in the file of a journal: length, CRC-32, payload."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from sf_core.dataplane.journal.events import Event, encode

_HEADER = struct.Struct("<II")


def frame(event: Event) -> bytes:
    return frame_payload(encode(event))


def frame_payload(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: BinaryIO) -> Iterator[bytes]:
    """Frames of a file up to the first that is broken."""
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        # a length of zero is what a file system leaves where nothing was written
        if not 0 < length <= os.fstat(file.fileno()).st_size - file.tell():
            return
        payload = file.read(length)
        if zlib.crc32(payload) != checksum:
            return
        yield header + payload


def payload(frame: bytes) -> bytes:
    return frame[_HEADER.size :]
