"""Files of a local disk: how they are opened, how a finished file gets its name, and locks.

What is read is a regular file, and nothing else is replaced. A named pipe in place of a file would keep a
reader waiting. A device in place of a file would be replaced by a file. A link in a folder in which others
may write would lead to a file that they choose.

A finished file is renamed to a name that must not exist yet, atomically: of two writers, one wins.

A lock is held by one process at a time, and the locked file says by which. The kernel frees the lock when
that process ends. A lock is of a file that nothing replaces: a lock on a replaced file would stay with the
old file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from storage.errors import StorageError
from storage.json_files import load_json

READER_S = 10.0
"""How long a named pipe may have no reader before what is written into it is refused."""

_LOOK_S = 0.05

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}

_STREAM = re.compile(rf"(?:/dev|/proc/(?:self|{os.getpid()}))/fd/(\d+)")


def open_to_read(path: str | Path) -> BinaryIO:
    """Open a regular file. Raises FileNotFoundError, and StorageError if something else is there."""
    _refuse(path, os.stat(path))
    # another process may have replaced it meanwhile: a pipe without a writer would keep us waiting
    return open(_check(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)), "rb")


def open_given(path: str | Path) -> BinaryIO:
    """Like `open_to_read`, for a file that the user names: a stream of this process may be named too, as in
    `sf train <(make-config)`."""
    number = stream_number(path)
    return open_to_read(path) if number is None else open(os.dup(number), "rb")


def open_own(path: str | Path, flags: int, mode: int = 0o600) -> int:
    """Opener of secrets and logs, which lie in folders where others may write. Raises StorageError if the
    path is a link, or anything else than a regular file."""
    check_replaceable(path)
    try:
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _explain(path, "a link") from None
        raise
    return _check(path, number)


def check_replaceable(path: str | Path) -> None:
    """Raises StorageError if the path is anything else than a regular file, and not free."""
    with suppress(FileNotFoundError):
        _refuse(path, os.lstat(path))


def open_stream(path: str) -> BinaryIO | None:
    """Open what is written into, and not replaced: a stream of this process (`/dev/stdout`), a named pipe or
    a device of characters; None if the path is none of these. Raises StorageError if nobody reads the
    pipe."""
    if (number := stream_number(path)) is not None:
        return open(os.dup(number), "wb")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISCHR(mode):
        return open(path, "wb")
    return _open_pipe(path) if stat.S_ISFIFO(mode) else None


def stream_number(path: str | Path) -> int | None:
    """File descriptor of the stream of this process that a path like `/dev/stdout` or `/dev/fd/63` names."""
    named = os.path.abspath(path)
    for _ in range(3):
        if (stream := _STREAM.fullmatch(named)) is not None:
            return int(stream[1])
        if not os.path.islink(named):
            break
        named = os.path.normpath(os.path.join(os.path.dirname(named), os.readlink(named)))
    return None


def _open_pipe(path: str) -> BinaryIO:
    give_up_at = time.monotonic() + READER_S
    while True:
        try:
            number = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > give_up_at:
                raise StorageError(f"{path}: nobody reads this named pipe since {READER_S:g} s") from None
            time.sleep(_LOOK_S)
        else:
            os.set_blocking(number, True)
            return open(number, "wb")


def _check(path: str | Path, number: int) -> int:
    try:
        _refuse(path, os.fstat(number))
    except StorageError:
        os.close(number)
        raise
    return number


def _refuse(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _explain(path, _KINDS.get(stat.S_IFMT(status.st_mode), "something else"))


def _explain(path: str | Path, kind: str) -> StorageError:
    return StorageError(f"{path} is {kind}, but must be a file: remove or rename it")


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of link() without hard links: on exFAT and FAT, and on many mounted object stores."""

_NO_SUCH_RENAME = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

# the os module has no rename that keeps an existing file; only Linux has this call
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def name_new(temporary: str, path: str) -> None:
    """Raises FileExistsError if `path` exists, and OSError if the file system has no way to tell. The
    temporary name may stay."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(temporary, path)


def _rename_new(temporary: str, path: str) -> None:
    code = errno.ENOSYS
    if _renameat2 is not None:
        names = _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path)
        if _renameat2(*names, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
    if code in _NO_SUCH_RENAME:
        # not a lock file: that of a killed process stays, and most such mounts lock on one host only
        raise OSError(
            "this file system has neither hard links nor a rename that keeps an existing file, so two "
            "attempts on a run could both commit: set storage.root to a local disk, to NFS, or, if this is a "
            "mounted object store, to the URL of the object store"
        )
    raise OSError(code, os.strerror(code), temporary, None, path)


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
