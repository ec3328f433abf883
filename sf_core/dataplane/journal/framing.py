"""The frames of a journal's file. Each frame holds a record: length, CRC-32, payload."""

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
    """Frames of a file, up to the first broken one."""
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        num_left = os.fstat(file.fileno()).st_size - file.tell()
        # a file system leaves zeros where nothing was written
        if not 0 < length <= num_left:
            return
        payload = file.read(length)
        if zlib.crc32(payload) != checksum:
            return
        yield header + payload


def payload(frame: bytes) -> bytes:
    return frame[_HEADER.size :]
