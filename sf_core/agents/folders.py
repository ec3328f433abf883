"""Reads folders that programs nobody trusts have written: no link leads out, no pipe is waited for."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import BinaryIO

MAX_ENTRIES = 100_000
"""Most files and folders that are looked at."""

_OPENAT2 = 437
"""Number of the system call, the same on all machines."""

_BENEATH = 0x08
_NO_LINKS = 0x04
_NO_MAGIC = 0x02


class TooManyFilesError(Exception):
    """A folder has more entries than are looked at."""


class LeadsOutError(Exception):
    """A name leads out of its folder."""


class _How(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


_libc = ctypes.CDLL(None, use_errno=True)


def is_name_below(name: str) -> bool:
    """Whether this can be the name of a file below a folder, spelled in one way."""
    is_relative = not os.path.isabs(name) and name.split("/")[0] not in (".", "..")
    return is_relative and os.path.normpath(name) == name and "\0" not in name


def open_folder(path: str | os.PathLike[str]) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def file_in(folder: int, name: str) -> BinaryIO | None:
    """A file below an open folder, by way of links that stay there; None if there is none. Raises
    LeadsOutError."""
    try:
        return _regular(_open_in(folder, name, os.O_NONBLOCK, _BENEATH | _NO_MAGIC))
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise LeadsOutError(f"{name} leads to a place outside the command's folder") from None
        return None


def files_below(folder: int) -> Iterator[tuple[str, BinaryIO]]:
    """All files below an open folder and their names, each open until the next is asked for. Links, pipes and
    devices are none, nor is what cannot be read. Raises TooManyFilesError."""
    todo = ["."]
    left = MAX_ENTRIES
    while todo:
        path = todo.pop()
        # what has become something else, or is closed to us, is no folder
        with suppress(OSError):
            inner = _open_in(folder, path, os.O_DIRECTORY, _BENEATH | _NO_LINKS)
            try:
                with os.scandir(inner) as entries:
                    batch = sorted(islice(entries, left + 1), key=lambda entry: entry.name)
                left -= len(batch)
                if left < 0:
                    raise TooManyFilesError(f"more than {MAX_ENTRIES} files")
                for entry in batch:
                    name = os.path.normpath(os.path.join(path, entry.name))
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(name)
                    elif (file := _file(inner, entry.name)) is not None:
                        with file:
                            yield name, file
            finally:
                os.close(inner)


def _file(folder: int, name: str) -> BinaryIO | None:
    try:
        return _regular(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder))
    except OSError:
        return None


def _regular(number: int) -> BinaryIO | None:
    if stat.S_ISREG(os.fstat(number).st_mode):
        return open(number, "rb")
    os.close(number)
    return None


def _open_in(folder: int, name: str, flags: int, resolve: int) -> int:
    how = _How(os.O_RDONLY | os.O_CLOEXEC | flags, 0, resolve)
    size = ctypes.sizeof(how)
    number = _libc.syscall(_OPENAT2, folder, os.fsencode(name), ctypes.byref(how), size)
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return int(number)
