"""A full disk, for the processes of a real data plane or for the tests' own."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No data plane started by this process can write to any file."""
    children = psutil.Process().children(recursive=True)
    # what other tests have killed may not have been asked for yet
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    processes = [child for child in alive if "dataplane" in child.cmdline()]
    assert processes
    for process in processes:
        process.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


@contextlib.contextmanager
def full_own_disk(max_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `max_bytes`."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
