"""How files of a local disk are opened: what is read is a regular file, and nothing else is replaced.

A named pipe in place of a file would keep a reader waiting. A device in place of a file would be replaced by
one. A link in a folder in which others may write would lead to a file that they choose.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from storage.errors import StorageError

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
        if (found := _STREAM.fullmatch(named)) is not None:
            return int(found[1])
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
