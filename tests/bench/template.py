"""A template of Python processes: it imports modules once and forks a process for each request. Only the
start of such a process differs from that of another: it has streams, an environment, a folder, arguments,
signals and an exit code of its own; its sys.path is the template's, with its folder first."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from typing import Any

STATUS = struct.Struct("i")
MOST_BYTES = 1 << 17
"""Most bytes of a request."""


class _Template:
    """The forked processes that run, and the connections that wait for their exit codes."""

    def __init__(self) -> None:
        self.waiting: dict[int, socket.socket] = {}

    def serve(self, requests: socket.socket) -> dict[str, Any]:
        """Fork until nobody asks any more. Returns in each forked process, with its request."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        while True:
            body, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 4)
            if not body:
                os._exit(0)
            asked = socket.socket(fileno=descriptors.pop())
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            pid = os.fork()
            if pid == 0:
                requests.close()
                for other in (asked, *self.waiting.values()):
                    other.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                _take(descriptors)
                return dict(json.loads(body))
            self.waiting[pid] = asked
            asked.send(STATUS.pack(pid))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self) -> None:
        while self.waiting:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            # nobody may ask any more
            with self.waiting.pop(pid) as asked, contextlib.suppress(BrokenPipeError):
                asked.send(STATUS.pack(os.waitstatus_to_exitcode(status)))


def _take(descriptors: list[int]) -> None:
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # the collections of forks neither look at nor copy what exists now
    gc.collect()
    gc.freeze()
    request = _Template().serve(requests)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.argv = ["", *request["words"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
