"""The local record of what must survive the data plane's death: finished sessions and rejected groups.

Owns framing (length, CRC-32, MessagePack) and group commit. Knows nothing of what the records mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack

log = logging.getLogger(__name__)

Record = dict[str, Any]

GATHER_S = 0.005
"""Records that arrive within this time share one fsync."""

_HEADER = struct.Struct("<II")


class Journal:
    """Appends from one event loop; files are touched by one thread, in order."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[bytes] = []
        self._written: asyncio.Future[None] | None = None

    def replay(self) -> list[Record]:
        """All intact records, oldest first. What follows a broken one is cut off: its write was torn."""
        data = self._path.read_bytes() if self._path.exists() else b""
        frames = list(_frames(data))
        intact = sum(len(frame) for frame in frames)
        if intact < len(data):
            log.warning("%s: cut %d bytes of a torn or corrupt tail", self._path, len(data) - intact)
            os.truncate(self._path, intact)
        return [_record(frame) for frame in frames]

    async def append(self, record: Record) -> None:
        """Returns when the record is on disk."""
        payload = msgpack.packb(record)
        self._pending.append(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
        if self._written is None:
            self._written = asyncio.ensure_future(self._commit())
        await asyncio.shield(self._written)

    async def compact(self, keep: Callable[[Record], bool]) -> None:
        """Drop the records that are not to be kept."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._rewrite, keep)

    async def close(self) -> None:
        if self._written is not None:
            await self._written
        self._thread.shutdown()

    async def _commit(self) -> None:
        await asyncio.sleep(GATHER_S)
        frames, self._pending, self._written = b"".join(self._pending), [], None
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, frames)

    def _write(self, frames: bytes) -> None:
        with open(self._path, "ab") as file:
            file.write(frames)
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self, keep: Callable[[Record], bool]) -> None:
        if not self._path.exists():
            return
        frames = [frame for frame in _frames(self._path.read_bytes()) if keep(_record(frame))]
        temporary = self._path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.write(b"".join(frames))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


def _frames(data: bytes) -> Iterator[bytes]:
    start = 0
    while start + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, start)
        end = start + _HEADER.size + length
        if end > len(data) or zlib.crc32(data[start + _HEADER.size : end]) != checksum:
            return
        yield data[start:end]
        start = end


def _record(frame: bytes) -> Record:
    return msgpack.unpackb(frame[_HEADER.size :], strict_map_key=False)
