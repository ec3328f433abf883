"""The append-only journal of all events that must survive the end of the data plane.

Owns the order of writes, fsync, and retries while the disk fails. A record is an event; the reader of a
journal knows the types of events.

Records that the disk refuses stay in memory, in their order, and are retried until written: the file never
lacks a record on which a later one builds. Callers wait meanwhile; `failure` gives the reason. If another
process owns the journal (ownership.py), nothing is retried, and callers are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sf_core.dataplane.conditions import Condition
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError, remedy
from sf_core.dataplane.journal.journal_file import PIECE_BYTES, Event, JournalFile, frame
from sf_core.dataplane.journal.ownership import NotOwnedError, Owner
from sf_core.dataplane.options import Fsync

log = logging.getLogger(__name__)

Waiter = asyncio.Future[None]
T = TypeVar("T")
E = TypeVar("E")
Compaction = tuple[Sequence[Event], Callable[[E], bool]]
"""Events that begin a compacted journal, and a predicate for the old events that follow them."""


GATHER_S = 0.005
"""Seconds for which fsync "group" collects records before it forces them to disk."""

RETRY_S = 0.5
"""Seconds between retries of a write that failed."""

UNSYNCED_BYTES = PIECE_BYTES
"""Number of unsynced bytes that triggers an fsync."""


class Journal:
    """Appends from one event loop, in order. The loop hands bytes to the kernel, which takes microseconds;
    one thread does the slow work: fsync, reading, rewriting. Writes during an fsync share the next one.

    This process owns it from the first read or append until `release` or `close`. All methods that read or
    wait raise ApiError 409 if another process owns it."""

    def __init__(self, path: Path, fsync: Fsync = "turn", owner: Owner | None = None) -> None:
        self.path = path
        self.failure: OSError | None = None
        """Why the journal cannot be written; None while it can."""
        self.num_failures = 0
        """Number of times that writing has begun to fail."""
        self.watchers: set[Condition] = set()
        """Notified when writing begins to fail."""
        self._failed_at = 0.0
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file = JournalFile(path, owner or Owner())
        self._exclusive = asyncio.Lock()
        """Locked while the thread works on the whole file; events appended meanwhile are written
        afterwards."""
        self._frames: list[bytes] = []
        """Frames that are not written yet, whether or not a caller waits for them."""
        self._written: list[bytes] = []
        """Frames that are written but not known to be on disk: a failed fsync may have lost them."""
        self._for_kernel: list[Waiter] = []
        """Waiters for `_frames` to be written."""
        self._for_disk: list[Waiter] = []
        """Waiters for `_frames` to be on disk."""
        self._unsynced: list[Waiter] = []
        """Waiters whose frames are written but not on disk."""
        self._write_is_due = False
        self._retry: asyncio.TimerHandle | None = None
        """Timer of the next attempt after a write that failed."""
        self._syncing: asyncio.Task[None] | None = None

    async def replay(self, read: Callable[[bytes], E]) -> AsyncGenerator[E, None]:
        """All intact records, oldest first, read piece by piece: appends go on in between. The file is
        truncated at a broken record, whose write was torn. Raises ApiError 503 while the journal cannot be
        written, and 409 if `read` raises ValueError."""
        pieces = self._file.read(partial(self._decode, read))
        while piece := await self._exclusively(lambda: partial(next, pieces, None)):
            for event in piece:
                yield event

    @property
    def is_lost(self) -> bool:
        """Whether another process owns the journal, or this one gave it up. This process may own it again
        once it opens it anew."""
        return isinstance(self.failure, NotOwnedError)

    @property
    def is_exclusive(self) -> bool:
        """Whether no other process can own the journal now."""
        return self._file.ownership.is_enforced

    def set_attempt(self, attempt: int) -> None:
        """Tell other processes that want the journal the attempt of the run that uses it."""
        self._file.ownership.set_attempt(attempt)

    async def release(self) -> None:
        """Let other processes own the journal until the next read or append, which finds out if one did."""
        if self._file.ownership.is_held and not self.is_lost:
            await self.flush()
            await self._exclusively(lambda: self._file.release)

    async def resume(self) -> bool:
        """Own the journal again. False if it is lost: then it must be closed and opened anew."""
        with suppress(ApiError):
            await self._exclusively(lambda: self._file.resume)
        return not self.is_lost

    async def give_up(self, error: NotOwnedError) -> None:
        """Write nothing from now on, and let other processes own the journal."""
        self._mark_lost(error)
        async with self._exclusive:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._file.release)

    def append_later(self, event: Event) -> None:
        """Write an event together with the next append, for events that only matter once another follows."""
        self._frames.append(frame(event))

    async def append(self, event: Event) -> None:
        """Returns when the event is on disk, however long that takes. Raises ApiError 503 if the journal is
        closed before."""
        self.append_later(event)
        await self.flush()

    async def append_chunk(self, event: Event) -> None:
        """Returns when the event survives this process; with fsync "chunk", when it is on disk."""
        self.append_later(event)
        await self.flush_chunk()

    async def flush(self) -> None:
        """Returns when all events so far are on disk; raises as `append` does."""
        await self._write_soon(self._for_disk)

    async def flush_chunk(self) -> None:
        """Returns when all events so far survive this process; with fsync "chunk", when they are on disk."""
        await self._write_soon(self._for_disk if self._fsync == "chunk" else self._for_kernel)

    async def compact(self, read: Callable[[bytes], E], choose: Callable[[], Compaction[E]]) -> None:
        """Rewrite the journal with the events that `choose` returns. `choose` is called when no other
        compaction is in progress: earlier appends are in the file then, and later ones will follow the
        compacted part. Its predicate is called in the thread. If rewriting fails, for example because the
        disk is full, the journal stays as it is."""
        try:
            await self._exclusively(lambda: self._make_rewrite(read, *choose()))
            self._written.clear()
        except (ApiError, OSError) as error:
            log.warning("%s cannot be compacted: %s", self.path, error)

    def check(self) -> None:
        """Raises ApiError 503 while the journal cannot be written."""
        if self.failure is not None:
            raise self._refusal(self.failure)

    async def await_unless_failing(self, work: Awaitable[T]) -> T:
        """Await `work`, which appends. Raises ApiError 503 if the journal cannot be written meanwhile; the
        work then continues in the background until the journal can be written."""
        working = asyncio.ensure_future(work)
        while not working.done():
            condition = Condition()
            self.watchers.add(condition)
            failing = asyncio.ensure_future(condition.until(lambda: self.failure is not None))
            try:
                await asyncio.wait((working, failing), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                working.cancel()
                raise
            finally:
                self.watchers.discard(condition)
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
            if self._frames:
                log.error("%s: %d records are lost", self.path, len(self._frames))
            self._refuse_all(self.failure)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._file.release)
        self._thread.shutdown()

    def _write_soon(self, waiting: list[Waiter]) -> Waiter:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        waiting.append(waiter)
        if not self._write_is_due:
            # events that are appended in the same iteration of the event loop share the write
            self._write_is_due = True
            loop.call_soon(self._write_if_free)
        return waiter

    def _write_if_free(self) -> None:
        if not self._exclusive.locked():
            self._write()

    def _write(self) -> None:
        self._write_is_due = False
        if self.is_lost:
            assert self.failure is not None
            return self._refuse_all(self.failure)
        try:
            if self._frames:
                self._file.append(b"".join(self._frames))
        except OSError as error:
            return self._handle_failure(error)
        self._end_retrying()
        self._written += self._frames
        self._unsynced += self._for_disk
        written = self._for_kernel
        self._frames = []
        self._for_kernel = []
        self._for_disk = []
        _resolve(written)
        num_unsynced_bytes = self._file.end - self._file.synced_end
        must_sync = self._unsynced or self.failure or num_unsynced_bytes > UNSYNCED_BYTES
        if must_sync and self._syncing is None:
            self._syncing = asyncio.ensure_future(self._sync_all())

    async def _sync_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._fsync == "group":
                    await asyncio.sleep(GATHER_S)
                waiting = self._unsynced
                self._unsynced = []
                num_frames = len(self._written)
                end = self._file.end
                try:
                    await loop.run_in_executor(self._thread, self._file.sync)
                except OSError as error:
                    return self._requeue_unsynced(waiting, error)
                del self._written[:num_frames]
                self._file.synced_end = end
                _resolve(waiting)
                if self._retry is None:
                    self._clear_failure()
                if not self._unsynced:
                    return
        finally:
            self._syncing = None

    def _requeue_unsynced(self, waiting: list[Waiter], error: OSError) -> None:
        """Queue unsynced frames again: a failed fsync may have discarded them, and the next fsync would
        succeed all the same."""
        self._frames[:0] = self._written
        self._written = []
        self._for_disk[:0] = waiting + self._unsynced
        self._unsynced = []
        self._file.end = self._file.synced_end
        self._handle_failure(error)

    def _handle_failure(self, error: OSError) -> None:
        self._end_retrying()
        if isinstance(error, NotOwnedError):
            self._file.ownership.release()
            return self._mark_lost(error)
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._write_if_free)
        if self.failure is None:
            self.failure = error
            self.num_failures += 1
            self._failed_at = time.monotonic()
            log.error("%s cannot be written: %s; retried every %g s", self.path, error, RETRY_S)
            self._notify()

    def _mark_lost(self, error: NotOwnedError) -> None:
        """Refuse all waiting callers and all later ones."""
        if not self.is_lost:
            log.error("%s (journal %s)", error, self.path)
            self.failure = error
            self.num_failures += 1
        self._refuse_all(error)
        self._notify()

    def _refuse_all(self, error: OSError) -> None:
        waiting = self._for_kernel + self._for_disk
        self._frames = []
        self._for_kernel = []
        self._for_disk = []
        _resolve(waiting, self._refusal(error))

    def _notify(self) -> None:
        for condition in self.watchers:
            condition.notify()

    def _end_retrying(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _refusal(self, error: OSError) -> ApiError:
        if isinstance(error, NotOwnedError):
            return ApiError(409, f"{error}.", code=error.code)
        return ApiError(
            503,
            f"The data plane cannot write its journal in {self.path.parent}: {error.strerror or error}. "
            f"{remedy(error)}. The run then continues, and this request can be sent again.",
            code="journal_unwritable",
            retry_after_s=RETRY_AFTER_S,
        )

    def _clear_failure(self) -> None:
        if self.failure is not None and not self.is_lost:
            self.failure = None
            log.warning(
                "%s can be written again, after %.0f s", self.path, time.monotonic() - self._failed_at
            )

    async def _exclusively(self, prepare: Callable[[], Callable[[], T]]) -> T:
        """Run the prepared work in the thread, with no other work on the file. All earlier appends are in the
        file then."""
        try:
            async with self._exclusive:
                self._write()
                work = prepare()
                if self._syncing is not None:
                    await self._syncing
                self.check()
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except NotOwnedError as error:
            self._handle_failure(error)
            raise self._refusal(error) from None
        finally:
            self._write_if_free()

    def _make_rewrite(
        self, read: Callable[[bytes], E], head: Sequence[Event], keep: Callable[[E], bool]
    ) -> Callable[[], None]:
        return partial(self._file.rewrite, map(frame, head), lambda data: keep(read(data)))

    def _decode(self, read: Callable[[bytes], E], data: bytes) -> E:
        try:
            return read(data)
        except ValueError as error:
            raise ApiError(
                409,
                f"{self.path} was written by another version of SeamlessFlow: {error}. Finish the run with "
                "that version, or remove the file: the run then continues from its last committed "
                "iteration.",
                code="journal_unreadable",
            ) from None


def _log_error(work: asyncio.Future[Any]) -> None:
    """Log the error of abandoned work, whose caller was told to retry."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("work that its caller no longer awaits failed: %s", error)


def _resolve(waiters: list[Waiter], error: ApiError | None = None) -> None:
    for waiter in waiters:
        if waiter.done():  # cancelled: its client went away
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
