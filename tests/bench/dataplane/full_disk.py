"""A full disk, for the processes of a real data plane or for the tests' own; and a process that can open no
more files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator

import psutil

from tests.bench.forks import running


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No data plane of `running_process` can write to any file."""
    processes = [psutil.Process(fork.pid) for fork in running("dataplane")]
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


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open no further file and no further connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    # those below are in use, and the first of them stay so; poll() works with as many as the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(free, 16), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
