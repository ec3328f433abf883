"""Keeps the memory of sessions and results below one bound by spilling idle ones to disk.

Owns the bound, the order of use and the spill files. How a session is written and read back is in
session_records.py, a result in finished.py. Spill files are never the only copy of anything, because the
journal has it all: they are not forced to disk, and those of a dead process are removed (recovery.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Record, frame, frames, private, unframe

log = logging.getLogger(__name__)

MEMORY_MB = 2048

START, STOP = 0.9, 0.8
"""Shares of the bound: above the first, items are spilled until the second is reached. The rest is room for
what arrives while they are written."""

MAX_TOGETHER = 64
"""Most items spilled, and most records taken back, in one step."""

RETRY_S = 10.0
"""Seconds after a disk error in which nothing is spilled."""


class Spillable(Protocol):
    @property
    def label(self) -> str:
        """Name of the item in messages."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the item takes in memory now."""

    @property
    def is_idle(self) -> bool: ...

    def records(self) -> Iterator[Record]:
        """Records that `take_back` needs. May be iterated in another thread while `drop` is called."""

    def drop(self) -> None:
        """Free the memory of all that the records hold."""

    def take_back(self, records: Iterable[Record]) -> None: ...


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    num_bytes: int
    """Valid bytes of the file; what follows them is ignored."""

    def read(self) -> list[Record]:
        """Raises OSError if the file does not hold what was written."""
        found, size = [], 0
        with open(self.path, "rb") as file:
            for data in frames(file):
                if size == self.num_bytes:
                    break
                found.append(unframe(data))
                size += len(data)
        if size != self.num_bytes:
            raise OSError(f"{self.path} is not what was written")
        return found

    def append(self, record: Record) -> None:
        data = frame(record)
        with open(self.path, "r+b") as file:
            file.seek(self.num_bytes)
            file.write(data)
        self.num_bytes += len(data)


@dataclass(slots=True, eq=False)
class _Entry:
    folder: Path
    goes_first: bool
    num_bytes: int = 0
    file: _File | None = None
    """Spill file of the item; None while it is in memory."""
    is_leaving: bool = False
    """The item is being spilled and has not been used since that began."""


class Memory:
    """All sessions and results of one process. To be used from one event loop."""

    def __init__(self, bound_mb: float = MEMORY_MB) -> None:
        self.bound_bytes = int(bound_mb * 2**20)
        self.num_bytes = 0
        """Estimated bytes in memory now, with what remains there of items on disk."""
        self.num_spills = 0
        self.num_loads = 0
        self._entries: dict[Spillable, _Entry] = {}
        self._idle: OrderedDict[Spillable, _Entry] = OrderedDict()
        """Items in memory that are not in use, the next to be spilled first."""
        self._folders: set[Path] = set()
        self._numbers = itertools.count()
        self._spilling: asyncio.Task[None] | None = None
        self._loading: dict[Spillable, asyncio.Task[None]] = {}
        self._retry_at = 0.0

    def add(self, item: Spillable, folder: Path, *, goes_first: bool = False) -> None:
        """Hold an item from now on, spilled to this folder if need be. With `goes_first` it is spilled before
        others however recently it was used."""
        self._folders.add(folder)
        self._entries[item] = _Entry(folder, goes_first)
        self.use(item)

    def remove(self, item: Spillable) -> None:
        """Forget an item and delete its spill file."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            self._idle.pop(item, None)
            self.num_bytes -= entry.num_bytes
            entry.is_leaving = False
            if entry.file is not None:
                _remove(entry.file)

    def use(self, item: Spillable) -> None:
        """Weigh an item again; called before and after it changes, and in between while it is in memory."""
        entry = self._entries.get(item)
        if entry is None or entry.file is not None:
            return
        entry.is_leaving = False
        self._weigh(item, entry)
        self._idle.pop(item, None)
        if item.is_idle:
            self._idle[item] = entry
            self._idle.move_to_end(item, last=not entry.goes_first)
        self._spill_if_needed()

    def is_on_disk(self, item: Spillable) -> bool:
        entry = self._entries.get(item)
        return entry is not None and entry.file is not None

    def count(self) -> Counter[tuple[type, bool]]:
        """Number of items by type and whether they are on disk."""
        return Counter((type(item), entry.file is not None) for item, entry in self._entries.items())

    async def load(self, item: Spillable) -> None:
        """Read an item on disk back into memory. Raises ApiError 500 if it cannot be read."""
        task = self._loading.get(item)
        if task is None:
            task = self._loading[item] = asyncio.ensure_future(self._load(item))
            task.add_done_callback(lambda _: self._loading.pop(item))
        await asyncio.shield(task)

    def reader(self, item: Spillable) -> Callable[[], list[Record]] | None:
        """Function that reads an item's file, in any thread, or raises OSError; None if it is in memory."""
        entry = self._entries[item]
        return None if entry.file is None else entry.file.read

    async def append(self, item: Spillable, record: Record) -> bool:
        """Append a record to an item's spill file. False: the item is in memory. Raises ApiError 500."""
        entry = self._entries.get(item)
        if entry is None or entry.file is None:
            return False
        try:
            entry.file.append(record)
        except OSError:  # without room on disk there may be some in memory
            await self.load(item)
            return False
        return True

    async def make_room(self) -> None:
        """Return once spilling has brought memory below the bound or as low as it can; for callers that fill
        memory without waiting for anything else."""
        if self._spilling is not None:
            await asyncio.shield(self._spilling)

    async def close(self) -> None:
        """Remove all files."""
        if self._spilling is not None:
            await asyncio.shield(self._spilling)
        for folder in self._folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _weigh(self, item: Spillable, entry: _Entry) -> None:
        num_bytes = item.num_bytes
        self.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes

    def _spill_if_needed(self) -> None:
        if (
            self._spilling is None
            and self._idle
            and self.num_bytes > START * self.bound_bytes
            and time.monotonic() >= self._retry_at
        ):
            self._spilling = asyncio.ensure_future(self._spill())

    async def _spill(self) -> None:
        try:
            while chosen := self._choose():
                await self._write(chosen)
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_S
            log.warning("sessions stay in memory, over the bound: they cannot be written: %s", error)
        finally:
            self._spilling = None

    def _choose(self) -> list[tuple[Spillable, _Entry]]:
        excess = self.num_bytes - STOP * self.bound_bytes
        chosen: list[tuple[Spillable, _Entry]] = []
        while excess > 0 and self._idle and len(chosen) < MAX_TOGETHER:
            item, entry = self._idle.popitem(last=False)
            if item.is_idle:
                chosen.append((item, entry))
                excess -= entry.num_bytes
        return chosen

    async def _write(self, chosen: list[tuple[Spillable, _Entry]]) -> None:
        """Spill these items. Raises OSError if one cannot be written; those before it are spilled."""
        for _, entry in chosen:
            entry.is_leaving = True
        records = [item.records() for item, _ in chosen]
        paths = [entry.folder / str(next(self._numbers)) for _, entry in chosen]
        files, error = await asyncio.to_thread(_write_files, paths, records)
        for (item, entry), file in zip(chosen, files, strict=False):
            if entry.is_leaving:
                item.drop()
                self._weigh(item, entry)
                entry.file, entry.is_leaving = file, False
                self.num_spills += 1
            else:
                _remove(file)
        for item, entry in reversed(chosen[len(files) :]):
            if entry.is_leaving:
                entry.is_leaving = False
                self._idle[item] = entry
                self._idle.move_to_end(item, last=False)
        if error is not None:
            raise error

    async def _load(self, item: Spillable) -> None:
        entry = self._entries[item]
        assert entry.file is not None
        try:
            records = await asyncio.to_thread(entry.file.read)
        except OSError as error:
            if item in self._entries:
                raise ApiError(500, f"The record of {item.label} cannot be read back: {error}.") from error
            return
        for i in range(0, len(records), MAX_TOGETHER):
            item.take_back(records[i : i + MAX_TOGETHER])
            await asyncio.sleep(0)  # other agents wait a millisecond or two, not for all records
        if item in self._entries:
            _remove(entry.file)
            entry.file = None
            self.num_loads += 1
            self.use(item)


def _write_files(
    paths: Iterable[Path], records: Iterable[Iterator[Record]]
) -> tuple[list[_File], OSError | None]:
    """Files written before the first error, and that error."""
    files: list[_File] = []
    for path, these in zip(paths, records, strict=True):
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(path, "wb", opener=private) as file:
                file.writelines(map(frame, these))
                num_bytes = file.tell()
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            return files, error
        files.append(_File(path, num_bytes))
    return files, None


def _remove(file: _File) -> None:
    # in a thread: it takes a while to give back the room of a large one
    asyncio.get_running_loop().run_in_executor(None, _unlink, file.path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
