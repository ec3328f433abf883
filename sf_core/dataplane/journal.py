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
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgpack

log = logging.getLogger(__name__)

Record = dict[str, Any]
"""Its first key is its kind."""
Waiter = asyncio.Future[None]
T = TypeVar("T")

Fsync = Literal["turn", "chunk", "group"]
"""What is forced to disk before anybody hears of it. turn: every whole turn and result; a chunk of a stream
is only handed to the kernel, which survives the death of the process but not of the machine. chunk: every
chunk too. group: as turn, but what arrives within GATHER_S shares one fsync."""

GATHER_S = 0.005

PIECE_BYTES = 4 * 2**20
"""Of the journal that is in memory at a time while it is read."""

_HEADER = struct.Struct("<II")


class Journal:
    """Appends from one event loop, in order. The loop hands bytes to the kernel, which takes microseconds;
    one thread does what takes long: forcing them to disk, reading, rewriting. What is written during an fsync
    shares the next one."""

    def __init__(self, path: Path, fsync: Fsync = "turn") -> None:
        self.path = path
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file: FileIO | None = None
        self._exclusive = asyncio.Lock()
        """Held while the thread has the whole file; what is appended meanwhile is written afterwards."""
        self._frames: list[bytes] = []
        """Not written yet; nobody need wait for them."""
        self._for_kernel: list[Waiter] = []
        self._for_disk: list[Waiter] = []
        """Who waits for them: to be written, or to be on disk."""
        self._unsynced: list[Waiter] = []
        """Whose frames are written and not on disk."""
        self._write_is_due = False
        self._syncing: asyncio.Task[None] | None = None

    async def replay(self) -> AsyncGenerator[Record, None]:
        """All intact records, oldest first, read piece by piece: appends go on in between. What follows a
        broken one is cut off: its write was torn."""
        pieces = self._read()
        while piece := await self._exclusively(next, pieces, None):
            for record in piece:
                yield record

    def note(self, record: Record) -> None:
        """Written with whatever is appended next: for what only matters once something follows it."""
        self._frames.append(frame(record))

    async def append(self, record: Record) -> None:
        """Returns when the record is on disk."""
        await self._add(record, self._for_disk)

    async def append_chunk(self, record: Record) -> None:
        """Returns when the record survives this process; with fsync "chunk", when it is on disk."""
        await self._add(record, self._for_disk if self._fsync == "chunk" else self._for_kernel)

    async def compact(self, head: Iterable[Record], keep: Callable[[Record], bool]) -> None:
        """Put `head` in front of the records that are to be kept, and drop the others. `keep` decides on what
        was appended before this call; it runs in the thread."""
        await self._exclusively(self._rewrite, list(head), keep)

    async def close(self) -> None:
        async with self._exclusive:
            self._write()
        if self._syncing is not None:
            await self._syncing
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_file)
        self._thread.shutdown()

    def _add(self, record: Record, waiting: list[Waiter]) -> Waiter:
        loop = asyncio.get_running_loop()
        self.note(record)
        waiter = loop.create_future()
        waiting.append(waiter)
        if not self._write_is_due:
            # what else is appended in this turn of the loop shares the write
            self._write_is_due = True
            loop.call_soon(self._write_if_free)
        return waiter

    def _write_if_free(self) -> None:
        if not self._exclusive.locked():
            self._write()

    def _write(self) -> None:
        self._write_is_due = False
        frames, for_kernel, for_disk = self._frames[:], self._for_kernel[:], self._for_disk[:]
        for waiting in (self._frames, self._for_kernel, self._for_disk):
            waiting.clear()
        try:
            self._append(frames)
        except OSError as error:
            return _settle(for_kernel + for_disk, error)
        _settle(for_kernel)
        self._unsynced += for_disk
        if self._unsynced and self._syncing is None:
            self._syncing = asyncio.ensure_future(self._sync_all())

    async def _sync_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsynced:
                if self._fsync == "group":
                    await asyncio.sleep(GATHER_S)
                waiting, self._unsynced = self._unsynced, []
                try:
                    await loop.run_in_executor(self._thread, self._sync)
                except OSError as error:
                    _settle(waiting, error)
                else:
                    _settle(waiting)
        finally:
            self._syncing = None

    async def _exclusively(self, work: Callable[..., T], *args: Any) -> T:
        """What `work` returns. It has the file for itself, with all that was appended before."""
        try:
            async with self._exclusive:
                self._write()
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        finally:
            self._write_if_free()

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

    def _append(self, frames: list[bytes]) -> None:
        if not frames:
            return
        if self._file is None:
            # not before: a run that is refused leaves nothing behind
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", 0, opener=private)  # noqa: SIM115 it stays open between writes
        end = self._file.seek(0, os.SEEK_END)
        data = memoryview(b"".join(frames))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            # half a frame in the middle would hide all that is appended later
            self._file.truncate(end)
            raise

    def _sync(self) -> None:
        # a file that was rewritten meanwhile is on disk
        if self._file is not None:
            os.fdatasync(self._file.fileno())

    def _rewrite(self, head: list[Record], keep: Callable[[Record], bool]) -> None:
        temporary = self.path.with_suffix(".tmp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
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


def _settle(waiters: list[Waiter], error: OSError | None = None) -> None:
    for waiter in waiters:
        if waiter.done():  # cancelled: its client went away
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


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
