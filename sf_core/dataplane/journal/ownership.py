"""The ownership of a journal: only the process that holds the lock on a file beside it may write it. Knows
nothing of what a journal contains.

The lock is not on the journal itself, which a compaction replaces. The list of the runs that a data plane
serves is for the process that replaces it.

A fence asks the run directory whether a later attempt of a run has begun, perhaps at another data plane. A
data plane that owns the journal in the run directory need not ask: no other one can have opened the run.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from storage.errors import StorageError
from storage.files import read_if_there, write_atomic
from storage.json_files import load_json
from storage.local import FileLock, Flock, HeldError, describe, find_holder


class OpenRuns:
    """Paths of the journals of the runs that a restart must reopen without a request, in one small file. A
    lock lets only one process at a time use the folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if another data plane works in this folder."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(folder / "lock")
        except HeldError:
            raise ValueError(
                f"another data plane uses {folder}: give this data plane its own folder"
            ) from None
        self._file = folder / "open-runs.json"
        self._journals: dict[str, str] = load_json(read_if_there(str(self._file)) or b"{}")

    @property
    def journals(self) -> list[Path]:
        # a run directory may have been removed since
        return [path for path in map(Path, self._journals.values()) if path.exists()]

    def add(self, run_id: str, journal: Path) -> None:
        self._write(self._journals | {run_id: str(journal.absolute())})

    def remove(self, run_id: str) -> None:
        self._write({name: journal for name, journal in self._journals.items() if name != run_id})

    def close(self) -> None:
        self._lock.close()

    def _write(self, journals: dict[str, str]) -> None:
        if journals == self._journals:
            return
        write_atomic(str(self._file), json.dumps(journals).encode())
        self._journals = journals


ANSWER_S = 30.0
"""Seconds in which the storage must answer."""


class Fence:
    """Asks one question at a time, in a thread. Callers during a question share the next one, because the
    answer must be newer than their call."""

    def __init__(self, is_superseded: Callable[[], bool]) -> None:
        self._is_superseded = is_superseded
        self._asking: asyncio.Future[bool] | None = None
        self._next: asyncio.Future[bool] | None = None

    async def is_superseded(self) -> bool:
        """Whether a later attempt has begun, by a question that began after this call. Raises ApiError 503 if
        the storage does not answer."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask())
        try:
            return await asyncio.wait_for(asyncio.shield(self._next), ANSWER_S)
        except (StorageError, TimeoutError) as error:
            raise ApiError(
                503,
                "The data plane cannot read from the run directory whether a later attempt of the run has "
                f"begun: {error or 'the storage does not answer'}. Send this request again.",
                code="attempt_unknown",
                retry_after_s=RETRY_AFTER_S,
            ) from None

    async def _ask(self) -> bool:
        if self._asking is not None:
            await asyncio.wait([self._asking])
        self._asking = self._next
        self._next = None
        return await asyncio.to_thread(self._is_superseded)


class NotOwnedError(OSError):
    """The journal is not, or is no longer, this process's to write; the message is one sentence."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        """Code of the error answer."""


@dataclass
class Owner:
    """The data plane that owns journals, as lock files describe it to other processes."""

    dataplane: str = ""
    """URL of the data plane. Empty: unknown."""
    journal_dir: str = ""
    """Folder of the data plane; empty without one."""
    flock: Flock = fcntl.flock


class Ownership:
    """The lock of one journal, which is acquired before the journal is first read or written."""

    def __init__(self, journal: Path, owner: Owner) -> None:
        self._journal = journal
        self._owner = owner
        self._attempt: int | None = None
        self._lock: FileLock | None = None

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    @property
    def is_enforced(self) -> bool:
        """Whether no other process can hold the lock."""
        return self._lock is not None and self._lock.is_enforced

    def acquire(self) -> None:
        """Raises NotOwnedError that names the holder if another process has the lock."""
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(lock_file(self._journal), flock=self._owner.flock)
        except HeldError as error:
            raise NotOwnedError(explain_held(self._journal, error.facts), "run_held") from None
        self._describe_owner()

    def set_attempt(self, attempt: int) -> None:
        """Tell other processes the attempt of the run that uses the journal."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._describe_owner()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _describe_owner(self) -> None:
        if self._lock is None:
            return
        owner = self._owner
        facts = {"dataplane": owner.dataplane, "journal_dir": owner.journal_dir, "attempt": self._attempt}
        known_facts = {name: value for name, value in facts.items() if value not in ("", None)}
        self._lock.record(**known_facts)


def lock_file(journal: Path) -> Path:
    return journal.with_suffix(".lock")


def explain_other_holder(journal: Path) -> str:
    """Sentence that names the data plane that has this journal open; empty if none has."""
    facts = find_holder(lock_file(journal))
    return "" if facts is None else explain_held(journal, facts)


def explain_held(journal: Path, facts: dict[str, Any]) -> str:
    attempt = facts.get("attempt")
    parts = [facts.get("dataplane"), describe(facts), "" if attempt is None else f"attempt {attempt}"]
    holder = ", ".join(str(part) for part in parts if part)
    return (
        f"run {journal.stem} is open at another data plane{f' ({holder})' if holder else ''}, which holds "
        f"{lock_file(journal)}: continue the run at that data plane (dataplane.url), or end that process and "
        "start the run again"
    )
