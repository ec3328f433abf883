"""The local record of what must survive the data plane's death.

Owns framing (length, CRC-32, MessagePack), the order of writes and when they are forced to disk. Knows
nothing of what the records mean (records.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import msgpack

log = logging.getLogger(__name__)

Record = dict[str, Any]

Fsync = Literal["turn", "chunk", "group"]
"""What is forced to disk before anybody hears of it. turn: every whole turn and result; a chunk of a stream
is only handed to the kernel, which survives the death of the process but not of the machine. chunk: every
chunk too. group: as turn, but what arrives within GATHER_S shares one fsync."""

GATHER_S = 0.005

_HEADER = struct.Struct("<II")


@dataclass(slots=True)
class _Commit:
    """Frames that are written together."""

    frames: list[bytes] = field(default_factory=list)
    fsync: bool = False
    written: asyncio.Future[None] | None = None
    """None while nobody waits for it."""


class Journal:
    """Appends from one event loop; the file is touched by one thread, in order. What arrives during a write
    shares the next one."""

    def __init__(self, path: Path, fsync: Fsync = "turn") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file: FileIO | None = None
        self._next = _Commit()
        self._writing: asyncio.Task[None] | None = None

    async def replay(self) -> list[Record]:
        """All intact records, oldest first. What follows a broken one is cut off: its write was torn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read)

    def note(self, record: Record) -> None:
        """Written with whatever is appended next: for what only matters once something follows it."""
        self._next.frames.append(_frame(record))

    async def append(self, record: Record) -> None:
        """Returns when the record is on disk."""
        await self._commit(record, fsync=True)

    async def append_chunk(self, record: Record) -> None:
        """Returns when the record survives this process; with fsync "chunk", when it is on disk."""
        await self._commit(record, fsync=self._fsync == "chunk")

    async def compact(self, head: Iterable[Record], keep: Callable[[Record], bool]) -> None:
        """Put `head` in front of the records that are to be kept, and drop the others. `keep` decides on what
        was appended before this call; it runs in the writing thread."""
        rewrite = asyncio.get_running_loop().run_in_executor(self._thread, self._rewrite, list(head), keep)
        await rewrite

    async def close(self) -> None:
        if self._next.frames and self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
        if self._writing is not None:
            await self._writing
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_file)
        self._thread.shutdown()

    async def _commit(self, record: Record, fsync: bool) -> None:
        commit = self._next
        commit.frames.append(_frame(record))
        commit.fsync |= fsync
        if commit.written is None:
            commit.written = asyncio.get_running_loop().create_future()
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
        await asyncio.shield(commit.written)

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._next.frames:
                if self._fsync == "group":
                    await asyncio.sleep(GATHER_S)
                commit, self._next = self._next, _Commit()
                written = commit.written or loop.create_future()
                try:
                    await loop.run_in_executor(self._thread, self._write, commit.frames, commit.fsync)
                except OSError as error:
                    written.set_exception(error)  # to those who wait for it; to the log if nobody does
                else:
                    written.set_result(None)
        finally:
            self._writing = None

    def _read(self) -> list[Record]:
        data = self.path.read_bytes() if self.path.exists() else b""
        frames = list(_frames(data))
        intact = sum(len(frame) for frame in frames)
        if intact < len(data):
            log.warning("%s: cut %d bytes of a torn or corrupt tail", self.path, len(data) - intact)
            os.truncate(self.path, intact)
        return [_record(frame) for frame in frames]

    def _write(self, frames: list[bytes], fsync: bool) -> None:
        if self._file is None:
            self._file = open(self.path, "ab", 0, opener=_private)  # noqa: SIM115 it stays open between writes
        end = self._file.seek(0, os.SEEK_END)
        data = memoryview(b"".join(frames))
        try:
            while data:
                data = data[self._file.write(data) :]
            if fsync:
                os.fsync(self._file.fileno())
        except OSError:
            # half a frame in the middle would hide all that is appended later
            self._file.truncate(end)
            raise

    def _rewrite(self, head: list[Record], keep: Callable[[Record], bool]) -> None:
        data = self.path.read_bytes() if self.path.exists() else b""
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "wb", opener=_private) as file:
            file.writelines(map(_frame, head))
            file.writelines(frame for frame in _frames(data) if keep(_record(frame)))
            file.flush()
            os.fsync(file.fileno())
        self._close_file()
        os.replace(temporary, self.path)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _private(path: str, flags: int) -> int:
    """Runs have keys, and agents see what others must not."""
    return os.open(path, flags, 0o600)


def _frame(record: Record) -> bytes:
    payload = msgpack.packb(record)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes) -> Iterator[bytes]:
    start = 0
    while start + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, start)
        end = start + _HEADER.size + length
        # a length of zero is what a file system leaves where nothing was written
        if not length or end > len(data) or zlib.crc32(data[start + _HEADER.size : end]) != checksum:
            return
        yield data[start:end]
        start = end


def _record(frame: bytes) -> Record:
    return msgpack.unpackb(frame[_HEADER.size :], strict_map_key=False)
