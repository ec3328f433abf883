"""The append-only journal of what must survive the data plane's death.

Owns framing (length, CRC-32), the order of writes, fsync, and retries while the disk fails. A record is an
event; which events there are, whoever reads a journal knows.

Records that the disk does not take stay in memory, in their order, and are retried until written: the file
never lacks a record that a later one builds on. Callers go on waiting meanwhile; `failure` says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.journal.events import Event, encode
from sf_core.dataplane.options import Fsync
from sf_core.dataplane.signals import Signal

log = logging.getLogger(__name__)

Waiter = asyncio.Future[None]
T = TypeVar("T")
E = TypeVar("E")
Compaction = tuple[Sequence[Event], Callable[[E], bool]]
"""Events that begin a compacted journal, and a predicate for the old ones to keep after them."""


GATHER_S = 0.005

RETRY_S = 0.5
"""Seconds between retries of a write that failed."""

PIECE_BYTES = 4 * 2**20
"""Bytes in memory at a time while a journal is read; as many unsynced bytes trigger an fsync."""

_HEADER = struct.Struct("<II")


class Journal:
    """Appends from one event loop, in order. The loop hands bytes to the kernel, which takes microseconds;
    one thread does the slow work: fsync, reading, rewriting. Writes during an fsync share the next one."""

    def __init__(self, path: Path, fsync: Fsync = "turn") -> None:
        self.path = path
        self.failure: OSError | None = None
        """Why the journal cannot be written; None while it can."""
        self.num_failures = 0
        """How often writing has begun to fail."""
        self.watchers: set[Signal] = set()
        """Notified when writing begins to fail."""
        self._failed_at = 0.0
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file: FileIO | None = None
        self._end = self._synced_end = 0
        """Bytes of the file that are valid, and that are on disk; what follows is a torn write."""
        self._exclusive = asyncio.Lock()
        """Held while the thread works on the whole file; what is appended meanwhile is written afterwards."""
        self._frames: list[bytes] = []
        """Frames that are not written yet, whether or not something waits for them."""
        self._written: list[bytes] = []
        """Frames that are written but not known to be on disk: a failed fsync may have lost them."""
        self._for_kernel: list[Waiter] = []
        self._for_disk: list[Waiter] = []
        """Waiters for `_frames` to be written, and those for them to be on disk."""
        self._unsynced: list[Waiter] = []
        """Waiters whose frames are written but not on disk."""
        self._write_is_due = False
        self._retry: asyncio.TimerHandle | None = None
        """Timer of the next attempt after a write that failed."""
        self._syncing: asyncio.Task[None] | None = None

    async def replay(self, read: Callable[[bytes], E]) -> AsyncGenerator[E, None]:
        """All intact records, oldest first, read piece by piece: appends go on in between. The file is cut at
        a broken record, whose write was torn. Raises ApiError 503 while the journal cannot be written, and
        409 if `read` raises ValueError."""
        pieces = self._read(read)
        while piece := await self._exclusively(lambda: partial(next, pieces, None)):
            for event in piece:
                yield event

    def note(self, event: Event) -> None:
        """Write an event with the next append: for events that only matter once another follows."""
        self._frames.append(frame(event))

    async def append(self, event: Event) -> None:
        """Returns when the event is on disk, however long that takes. Raises ApiError 503 if the journal is
        closed before."""
        self.note(event)
        await self.flush()

    async def append_chunk(self, event: Event) -> None:
        """Returns when the event survives this process; with fsync "chunk", when it is on disk."""
        self.note(event)
        await self.flush_chunk()

    async def flush(self) -> None:
        """Returns when all events so far are on disk; raises as `append` does."""
        await self._write_soon(self._for_disk)

    async def flush_chunk(self) -> None:
        """Returns when all events so far survive this process; with fsync "chunk", when they are on disk."""
        await self._write_soon(self._for_disk if self._fsync == "chunk" else self._for_kernel)

    async def compact(self, read: Callable[[bytes], E], choose: Callable[[], Compaction[E]]) -> None:
        """Rewrite the journal as `choose` says. It is called when no other compaction is under way: earlier
        appends are in the file then, and later ones will follow the compacted part. Its predicate is called
        in the thread. If rewriting fails, for lack of room say, the journal stays as it is."""
        try:
            await self._exclusively(lambda: partial(self._rewrite, read, *choose()))
        except (ApiError, OSError) as error:
            log.warning("%s cannot be compacted: %s", self.path, error)

    def check(self) -> None:
        """Raises ApiError 503 while the journal cannot be written."""
        if self.failure is not None:
            raise self._refusal(self.failure)

    async def attend(self, work: Awaitable[T]) -> T:
        """Await `work`, which appends. Raises ApiError 503 if the journal cannot be written meanwhile; the
        work then goes on in the background until it can."""
        working = asyncio.ensure_future(work)
        while not working.done():
            signal = Signal()
            self.watchers.add(signal)
            failing = asyncio.ensure_future(signal.until(lambda: self.failure is not None))
            try:
                await asyncio.wait((working, failing), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                working.cancel()
                raise
            finally:
                self.watchers.discard(signal)
                failing.cancel()
            if self.failure is not None and not working.done():
                working.add_done_callback(_log_error)
                raise self._refusal(self.failure)
        return working.result()

    async def close(self) -> None:
        """Write what is pending and close the file; records that cannot be written are lost."""
        async with self._exclusive:
            self._write()
        if self._syncing is not None:
            await self._syncing
        self._end_retrying()
        if self.failure is not None:
            log.error("%s: %d records are lost", self.path, len(self._frames))
            _settle(self._for_kernel + self._for_disk, self._refusal(self.failure))
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_file)
        self._thread.shutdown()

    def _write_soon(self, waiting: list[Waiter]) -> Waiter:
        loop = asyncio.get_running_loop()
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
        try:
            self._append(self._frames)
        except OSError as error:
            return self._fail(error)
        self._end_retrying()
        self._written += self._frames
        self._unsynced += self._for_disk
        written, self._frames, self._for_kernel, self._for_disk = self._for_kernel, [], [], []
        _settle(written)
        is_due = self._unsynced or self.failure or self._end > self._synced_end + PIECE_BYTES
        if is_due and self._syncing is None:
            self._syncing = asyncio.ensure_future(self._sync_all())

    async def _sync_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._fsync == "group":
                    await asyncio.sleep(GATHER_S)
                waiting, self._unsynced = self._unsynced, []
                num_frames, end = len(self._written), self._end
                try:
                    await loop.run_in_executor(self._thread, self._sync)
                except OSError as error:
                    return self._take_back(waiting, error)
                del self._written[:num_frames]
                self._synced_end = end
                _settle(waiting)
                if self._retry is None:
                    self._recover()
                if not self._unsynced:
                    return
        finally:
            self._syncing = None

    def _take_back(self, waiting: list[Waiter], error: OSError) -> None:
        """Queue unsynced frames again: a failed fsync may have discarded them; the next would not tell."""
        self._frames[:0], self._written = self._written, []
        self._for_disk[:0], self._unsynced = waiting + self._unsynced, []
        self._end = self._synced_end
        self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._end_retrying()
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._write_if_free)
        if self.failure is None:
            self.failure = error
            self.num_failures += 1
            self._failed_at = time.monotonic()
            log.error("%s cannot be written: %s; retried every %g s", self.path, error, RETRY_S)
            for signal in self.watchers:
                signal.notify()

    def _end_retrying(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _refusal(self, error: OSError) -> ApiError:
        return ApiError(
            503,
            f"The data plane cannot write its journal in {self.path.parent}: {error.strerror or error}. "
            "Free space there or repair the disk. The run then continues, and this request can be sent "
            "again.",
            code="journal_unwritable",
            retry_after_s=RETRY_AFTER_S,
        )

    def _recover(self) -> None:
        if self.failure is not None:
            self.failure = None
            log.warning(
                "%s can be written again, after %.0f s", self.path, time.monotonic() - self._failed_at
            )

    async def _exclusively(self, prepare: Callable[[], Callable[[], T]]) -> T:
        """Run the prepared work in the thread, alone on the file, which has all that was appended before."""
        try:
            async with self._exclusive:
                self._write()
                work = prepare()
                if self._syncing is not None:
                    await self._syncing
                self.check()
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._write_if_free()

    def _read(self, read: Callable[[bytes], E]) -> Iterator[list[E]]:
        if not self.path.exists():
            return
        with open(self.path, "r+b") as file:
            piece: list[E] = []
            end = intact = 0
            for data in frames(file):
                piece.append(self._event_of(data, read))
                intact += len(data)
                if intact >= end + PIECE_BYTES:
                    yield piece
                    piece, end = [], intact
            if excess := os.fstat(file.fileno()).st_size - intact:
                log.warning("%s: removed %d bytes of an incomplete or corrupt end", self.path, excess)
                file.truncate(intact)
                self._close_file()
        if piece:
            yield piece

    def _event_of(self, data: bytes, read: Callable[[bytes], E]) -> E:
        try:
            return read(payload(data))
        except ValueError as error:
            raise ApiError(
                409,
                f"{self.path} was written by another version of SeamlessFlow: {error}. Finish the run with "
                "that version, or remove the file: the run then continues from its last committed "
                "iteration.",
                code="journal_unreadable",
            ) from None

    def _append(self, frames: list[bytes]) -> None:
        if not frames:
            return
        if self._file is None:
            # opened no earlier, so that a run that is refused leaves nothing behind
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", 0, opener=private)  # noqa: SIM115 it stays open between writes
            self._end = self._synced_end = self._file.seek(0, os.SEEK_END)
            self._written = []
        if self._file.seek(0, os.SEEK_END) != self._end:
            # half a frame in the middle would hide all that is appended later
            self._file.truncate(self._end)
        data = memoryview(b"".join(frames))
        while data:
            data = data[self._file.write(data) :]
        self._end += sum(map(len, frames))

    def _sync(self) -> None:
        # closed by a rewrite, which has forced the file to disk
        if self._file is not None:
            os.fdatasync(self._file.fileno())

    def _rewrite(self, read: Callable[[bytes], E], head: Sequence[Event], keep: Callable[[E], bool]) -> None:
        temporary = self.path.with_suffix(".tmp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(0o600)
        try:
            with open(self.path, "rb") as before, open(temporary, "wb", opener=private) as file:
                file.writelines(map(frame, head))
                file.writelines(data for data in frames(before) if keep(read(payload(data))))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._close_file()
        os.replace(temporary, self.path)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _log_error(work: asyncio.Future[Any]) -> None:
    """Log the error of abandoned work, whose caller has been told to retry."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("work that its caller no longer awaits failed: %s", error)


def _settle(waiters: list[Waiter], error: ApiError | None = None) -> None:
    for waiter in waiters:
        if waiter.done():  # cancelled: its client went away
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def private(path: str, flags: int) -> int:
    """Opener of files that no other user may read: they hold keys of runs and private data of agents."""
    return os.open(path, flags, 0o600)


def frame(event: Event) -> bytes:
    payload = encode(event)
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
