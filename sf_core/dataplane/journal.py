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
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgpack

log = logging.getLogger(__name__)

Record = dict[str, Any]
"""Its first key is its kind."""

Fsync = Literal["turn", "chunk", "group"]
"""What is forced to disk before anybody hears of it. turn: every whole turn and result; a chunk of a stream
is only handed to the kernel, which survives the death of the process but not of the machine. chunk: every
chunk too. group: as turn, but what arrives within GATHER_S shares one fsync."""

GATHER_S = 0.005

PIECE_BYTES = 4 * 2**20
"""Of the journal that is in memory at a time while it is read."""

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

    async def replay(self) -> AsyncGenerator[Record, None]:
        """All intact records, oldest first, read piece by piece. What follows a broken one is cut off: its
        write was torn."""
        loop, pieces = asyncio.get_running_loop(), self._read()
        while piece := await loop.run_in_executor(self._thread, next, pieces, None):
            for record in piece:
                yield record

    def note(self, record: Record) -> None:
        """Written with whatever is appended next: for what only matters once something follows it."""
        self._next.frames.append(frame(record))

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
        commit.frames.append(frame(record))
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

    def _read(self) -> Iterator[list[Record]]:
        if not self.path.exists():
            return
        with open(self.path, "r+b") as file:
            piece: list[Record] = []
            end = intact = 0
            for data in frames(file):
                piece.append(unframe(data))
                intact += len(data)
                if intact >= end + PIECE_BYTES:
                    yield piece
                    piece, end = [], intact
            if excess := os.fstat(file.fileno()).st_size - intact:
                log.warning("%s: cut %d bytes of a torn or corrupt tail", self.path, excess)
                file.truncate(intact)
        if piece:
            yield piece

    def _write(self, data_of: list[bytes], fsync: bool) -> None:
        if self._file is None:
            self._file = open(self.path, "ab", 0, opener=private)  # noqa: SIM115 it stays open between writes
        end = self._file.seek(0, os.SEEK_END)
        data = memoryview(b"".join(data_of))
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
        temporary = self.path.with_suffix(".tmp")
        self.path.touch(0o600)
        with open(self.path, "rb") as before, open(temporary, "wb", opener=private) as file:
            file.writelines(map(frame, head))
            file.writelines(data for data in frames(before) if keep(unframe(data)))
            file.flush()
            os.fsync(file.fileno())
        self._close_file()
        os.replace(temporary, self.path)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def private(path: str, flags: int) -> int:
    """Opens a file that nobody else may read: runs have keys, and agents see what others must not."""
    return os.open(path, flags, 0o600)


def kind_of(record: Record) -> str:
    return next(iter(record))


def frame(record: Record) -> bytes:
    payload = msgpack.packb(record)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: BinaryIO) -> Iterator[bytes]:
    """Those up to the first that is broken."""
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        # a length of zero is what a file system leaves where nothing was written
        if not 0 < length <= os.fstat(file.fileno()).st_size - file.tell():
            return
        payload = file.read(length)
        if zlib.crc32(payload) != checksum:
            return
        yield header + payload


def unframe(data: bytes) -> Record:
    return msgpack.unpackb(memoryview(data)[_HEADER.size :], strict_map_key=False)
