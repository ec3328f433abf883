"""Locks on files of a local disk, each held by one process at a time; the locked file says by which.

The kernel frees a lock when its process ends, however that ends. A lock is of a file that nothing replaces: a
lock on a file that is replaced would stay with the old one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.json_files import load_json
from storage.local.opening import open_own

Flock = Callable[[int, int], None]
"""Function with the arguments and the errors of fcntl.flock."""

_TRIES = 3
_PAUSE_S = 0.01
"""A process that only looks who holds the lock has it for microseconds."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class HeldError(ValueError):
    """Another process holds the lock; `facts` are those that it wrote, as far as they can be read."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        super().__init__(f"{path} is locked by {describe(facts) or 'another process'}")
        self.facts = facts


class FileLock:
    """A held lock, until `close` or the end of this process. Child processes do not inherit it."""

    def __init__(self, path: Path, *, flock: Flock = fcntl.flock) -> None:
        """Make the file if it is missing, and lock it. Raises HeldError."""
        self.path = path
        self.is_enforced = True
        """False on a file system without locks: other processes may hold this lock too."""
        while not self._is_there(fd := self._lock(flock)):
            os.close(fd)
        self._file = os.fdopen(fd, "r+b", buffering=0)

    def record(self, **facts: Any) -> None:
        """Write who holds the lock; without effect on a full disk."""
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time(), **facts}
        content = json.dumps(holder).encode()
        with suppress(OSError):
            self._file.truncate(0)
            os.pwrite(self._file.fileno(), content, 0)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, flock: Flock) -> int:
        # not inherited by programs that this process starts (PEP 446)
        fd = open_own(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        for tries_left in reversed(range(_TRIES)):
            try:
                flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not tries_left:
                    facts = _read_facts(fd)
                    os.close(fd)
                    raise HeldError(self.path, facts) from None
                time.sleep(_PAUSE_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(fd)
                    raise
                self.is_enforced = False
                break
        return fd

    def _is_there(self, fd: int) -> bool:
        """Whether the path still names the locked file: its folder may have been removed meanwhile."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(fd))
        except FileNotFoundError:
            return False


def find_holder(path: Path) -> dict[str, Any] | None:
    """What the holder of the lock on this file has written; None: nobody holds the lock."""
    try:
        fd = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_facts(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def describe(facts: dict[str, Any]) -> str:
    """The process that wrote these facts; empty if they do not say."""
    with suppress(KeyError, TypeError, ValueError):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["since"]))
        return f"process {facts['pid']} on {facts['host']} since {since}"
    return ""


def _read_facts(fd: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        facts = load_json(os.pread(fd, 2**16, 0))
        return facts if isinstance(facts, dict) else {}
    return {}
