"""The supervisord process that `sf_core.cli.stack.supervisor` starts, with the arguments of supervisord. Its
parts end when it does, even by kill -9, and leave nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from sf_core.keeper import is_keeper

if TYPE_CHECKING:
    import psutil

MARK = "SF_STACK"
"""Environment variable with the folder of the stack, set in every process that the stack started."""


def end_with(parent: int) -> None:
    """Have this process, a fork of the parent, terminated when the parent ends, also if it has ended already;
    only on Linux."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        # the parent's handler, which is here until this process becomes another program, might do nothing
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:
            signal.raise_signal(signal.SIGTERM)


def end_marked(folder: str) -> bool:
    """Kill all processes with the mark of the stack except this one; False if there are none."""
    import psutil

    found = []
    for process, mark in carriers(MARK):
        if mark == folder and process.pid != os.getpid():
            with suppress(psutil.Error):
                # they end by themselves when their worker has, with those of their family that bear no mark
                if not is_keeper(process.cmdline()):
                    process.kill()
                found.append(process)
    _, left = psutil.wait_procs(found, timeout=5)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return bool(found)


def carriers(variable: str) -> Iterator[tuple[psutil.Process, str]]:
    """Processes of this machine with this environment variable, and its value, as far as this process may
    inspect them."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if value := process.environ().get(variable):
                yield process, value


def main() -> None:
    from supervisor.supervisord import main as supervise

    # called in each part, because supervisord forks once for each
    os.register_at_fork(after_in_child=partial(end_with, os.getpid()))
    try:
        supervise()
    finally:
        end_marked(os.environ[MARK])


if __name__ == "__main__":
    main()
