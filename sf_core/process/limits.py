"""The limits that the system sets this process: open files, and memory."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from typing import ClassVar

OPEN_FILES = 4096
"""Requested limit: sockets count, and a data plane has one for each request that waits."""


FEWEST_OPEN_FILES = 1024
"""Limit below which supervisord refuses to start."""


def raise_open_files() -> None:
    """Raise the limit on open files of this process and its children to OPEN_FILES, if the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_open_files() -> None:
    """Raises OSError, one sentence, if the limit on open files is too low for a stack."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_OPEN_FILES:
        raise OSError(
            f"this process may open {soft} files, but a stack needs {FEWEST_OPEN_FILES}: enter `ulimit -n "
            f"{OPEN_FILES}`, or raise the hard limit (`nofile` in /etc/security/limits.conf, LimitNOFILE of "
            "systemd)"
        )


TRIMMED_BYTES = 1 << 30
"""Freed memory above which a worker returns it to the system."""


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 (mallinfo(3))."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def trim_memory() -> None:
    """Return memory that was freed to the system, if it is more than TRIMMED_BYTES. Workers keep it
    otherwise, because to take it again costs time (docs/decisions/005). For moments at which what comes next
    needs far less."""
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo
        if libc.mallinfo2().fordblks > TRIMMED_BYTES:
            libc.malloc_trim(0)
