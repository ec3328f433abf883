"""supervisord whose parts end when it does, even by kill -9, and leave nothing behind: the process that
`sf_core.supervisor` starts, with the arguments of supervisord.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

MARK = "SF_STACK"
"""Environment variable of everything that a stack started: the stack's folder."""


def end_with_parent() -> None:
    """Have this process terminated when the one that started it ends, on Linux."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def end_marked(folder: str) -> bool:
    """Kill whatever carries the mark of the stack, but this process; False if nothing does."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == folder and process.pid != os.getpid():
                process.kill()
                found.append(process)
        except psutil.Error:
            continue
    psutil.wait_procs(found, timeout=5)
    return bool(found)


def main() -> None:
    from supervisor.supervisord import main as supervise

    # supervisord forks once for each part that it starts
    os.register_at_fork(after_in_child=end_with_parent)
    try:
        supervise()
    finally:
        end_marked(os.environ[MARK])


if __name__ == "__main__":
    main()
