"""What sessions and results hold in memory, kept below one bound: what nobody uses goes to disk.

Owns the bound, the order of use and the files. How a session is written and taken back is in
session_records.py, a result in records.py. Files are never the only copy of anything, because the journal has
it all: they are not forced to disk, and those of a dead process are removed (recovery.py).
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
"""Shares of the bound: over the first, items are written until the second is reached. The rest is room for
what comes while they are written."""

MAX_TOGETHER = 64
"""Items that are written, and records that are taken back, in one go."""

RETRY_S = 10.0
"""After an error of the disk nothing is written for so long."""


class Spillable(Protocol):
    @property
    def label(self) -> str:
        """Which one it is, for messages."""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory now."""

    @property
    def is_idle(self) -> bool: ...

    def records(self) -> Iterator[Record]:
        """What `take_back` needs. May be iterated in another thread while others call `drop`."""

    def drop(self) -> None:
        """Give back the memory of all that its records tell."""

    def take_back(self, records: Iterable[Record]) -> None: ...


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    num_bytes: int
    """What lies behind them is no part of it."""

    def read(self) -> list[Record]:
        """Raises OSError if it is not what was written."""
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
    """Where it is, unless it is in memory."""
    is_leaving: bool = False
    """It is being written, and has not been used since that began."""


class Memory:
    """All sessions and results of one data plane. To be used from one event loop."""

    def __init__(self, bound_mb: float = MEMORY_MB) -> None:
        self.bound_bytes = int(bound_mb * 2**20)
        self.num_bytes = 0
        """Held now, about; of what is on disk, what stays in memory of it."""
        self.num_spills = 0
        self.num_loads = 0
        self._entries: dict[Spillable, _Entry] = {}
        self._idle: OrderedDict[Spillable, _Entry] = OrderedDict()
        """In memory and not in use; what is to go next comes first."""
        self._folders: set[Path] = set()
        self._numbers = itertools.count()
        self._spilling: asyncio.Task[None] | None = None
        self._loading: dict[Spillable, asyncio.Task[None]] = {}
        self._retry_at = 0.0

    def add(self, item: Spillable, folder: Path, *, goes_first: bool = False) -> None:
        """Hold it from now on, at times in a file of this folder. What goes first does so whenever it was
        used last."""
        self._folders.add(folder)
        self._entries[item] = _Entry(folder, goes_first)
        self.use(item)

    def remove(self, item: Spillable) -> None:
        """It is gone for good, and its file with it."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            self._idle.pop(item, None)
            self.num_bytes -= entry.num_bytes
            entry.is_leaving = False
            if entry.file is not None:
                _remove(entry.file)

    def use(self, item: Spillable) -> None:
        """To be called before and after it changes, and in between if it is in memory meanwhile."""
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
        """Items by their type and whether they are on disk."""
        return Counter((type(item), entry.file is not None) for item, entry in self._entries.items())

    async def load(self, item: Spillable) -> None:
        """Have an item in memory that is on disk. Raises ApiError 500 if it cannot be read."""
        task = self._loading.get(item)
        if task is None:
            task = self._loading[item] = asyncio.ensure_future(self._load(item))
            task.add_done_callback(lambda _: self._loading.pop(item))
        await asyncio.shield(task)

    def reader(self, item: Spillable) -> Callable[[], list[Record]] | None:
        """Reads an item that is on disk, in any thread, and leaves it there: raises OSError. None: it is in
        memory."""
        entry = self._entries[item]
        return None if entry.file is None else entry.file.read

    async def append(self, item: Spillable, record: Record) -> bool:
        """Put one more record behind those of an item. False: it is in memory. Raises ApiError 500."""
        entry = self._entries.get(item)
        if entry is None or entry.file is None:
            return False
        try:
            entry.file.append(record)
        except OSError:  # where there is no room on disk, there may be in memory
            await self.load(item)
            return False
        return True

    async def make_room(self) -> None:
        """For who fills memory without ever waiting for anything else: returns when it is below the bound,
        or can be brought no lower."""
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
        """Raises OSError if one could not be written; the others are."""
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
            await asyncio.sleep(0)  # other agents wait a millisecond or two, not for all of it
        if item in self._entries:
            _remove(entry.file)
            entry.file = None
            self.num_loads += 1
            self.use(item)


def _write_files(
    paths: Iterable[Path], records: Iterable[Iterator[Record]]
) -> tuple[list[_File], OSError | None]:
    """Those written before the first error, and that."""
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
