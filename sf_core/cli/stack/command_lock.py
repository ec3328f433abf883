"""Lock on the local folder of a run or a sweep: one command at a time works there. A second command is told
which one it is."""

from __future__ import annotations

from pathlib import Path

from storage import local
from storage.local import FileLock
from storage.run_directory import RunDirectory


class HeldError(ValueError):
    """Another command works in the folder; the message says which, and what to do."""


def lock_run(run: RunDirectory) -> FileLock:
    """Lock the run's local folder, which exists. Raises HeldError."""
    another = "to start a new run instead, add --set run_id=NAME"
    return hold_folder(Path(run.local_dir), f"run {run.run_id}", another)


def hold_folder(folder: Path, name: str, another: str) -> FileLock:
    """Lock a folder, which exists, against other commands until the returned lock is closed or this process
    ends. Raises HeldError, which names what is locked and ends with `another`, how to begin another one. On a
    file system without locks it has no effect."""
    try:
        lock = FileLock(folder / "command.lock")
    except local.HeldError as error:
        holder = ", ".join(filter(None, ["another command", local.describe(error.facts)]))
        raise HeldError(
            f"{name} is in use by {holder}: wait until that command ends, or stop that command with Ctrl-C, "
            f"and run this command again; {another}"
        ) from None
    lock.record()
    return lock
