"""Lock on the local folder of a run: one command at a time works there; a second one is told which it is."""

from __future__ import annotations

from pathlib import Path

from storage import locks
from storage.locks import FileLock
from storage.run_directory import RunDirectory


class HeldError(ValueError):
    """Another command works in the folder; the message says which, and what to do."""


def hold(run: RunDirectory) -> FileLock:
    """Lock the run's local folder, which exists, against other commands until the returned lock is closed or
    this process ends. Raises HeldError. On a file system without locks it has no effect."""
    try:
        lock = FileLock(Path(run.local_dir, "command.lock"))
    except locks.HeldError as error:
        holder = ", ".join(filter(None, ["another command", locks.describe(error.facts)]))
        raise HeldError(
            f"run {run.run_id} is in use by {holder}: wait until that command ends, or stop that command "
            "with Ctrl-C, and run this command again; to start a new run instead, add --set run_id=NAME"
        ) from None
    lock.tell()
    return lock
