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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

MARK = "SF_STACK"
"""Environment variable with the folder of the stack, set in every process that the stack started."""


def end_with_parent() -> None:
    """Have this process terminated when its parent ends; only on Linux."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def end_marked(folder: str) -> bool:
    """Kill all processes with the mark of the stack except this one; False if there are none."""
    import psutil

    found = []
    for process, mark in carriers(MARK):
        if mark == folder and process.pid != os.getpid():
            with suppress(psutil.Error):
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=5)
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
    os.register_at_fork(after_in_child=end_with_parent)
    try:
        supervise()
    finally:
        end_marked(os.environ[MARK])


if __name__ == "__main__":
    main()
