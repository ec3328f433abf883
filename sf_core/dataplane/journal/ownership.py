"""The ownership of a journal: only the process that holds the lock on a file beside it may write it.

The lock is not on the journal itself, which a compaction replaces. Knows nothing of what a journal contains.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.locks import FileLock, Flock, HeldError, describe, find_holder


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
