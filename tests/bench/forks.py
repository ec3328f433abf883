"""Processes of `python -m MODULE WORDS` that are forked from a template, which has imported what they need.
The imports of `sf dataplane` cost more CPU than all that a test asks of it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.bench.template import STATUS
from tests.bench.waits import patience

_ROOT = Path(__file__).parents[2]

_running: set[Fork] = set()


class Fork:
    """A running process. What it has of subprocess.Popen means the same there."""

    def __init__(
        self,
        preloaded: tuple[str, ...],
        module: str,
        *words: str,
        streams: tuple[int, int, int] = (0, 1, 2),
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`preloaded`: modules that the template imports. `variables` are added to the environment."""
        request = {
            "module": module,
            "words": words,
            "folder": str(folder or Path.cwd()),
            "environment": {**os.environ, **(variables or {})},
        }
        self._told, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            body = json.dumps(request).encode()
            socket.send_fds(_template(preloaded), [body], [*streams, theirs.fileno()])
        self.pid = self._read()
        self.words = words
        self.returncode: int | None = None
        _running.add(self)

    def _read(self) -> int:
        (number,) = STATUS.unpack(self._told.recv(STATUS.size))
        return int(number)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                self.returncode = self._read()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.words, timeout or 0.0) from None
            self._told.close()
            _running.discard(self)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def run_fork(
    preloaded: tuple[str, ...],
    module: str,
    *words: str,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The process at its end, with what it has printed."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as told,
    ):
        streams = (0, out.fileno(), told.fileno())
        fork = Fork(preloaded, module, *words, streams=streams, folder=folder, variables=variables)
        try:
            code = fork.wait(patience())
        finally:
            fork.kill()
        out.seek(0)
        told.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), told.read())


def running(word: str) -> list[Fork]:
    """Forks with this word that have not ended."""
    return [fork for fork in [*_running] if word in fork.words and fork.poll() is None]


@functools.cache
def _template(modules: tuple[str, ...]) -> socket.socket:
    """Where a template with these modules, which ends with this process, takes requests."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.bench.template", str(theirs.fileno()), *modules]
    null = subprocess.DEVNULL
    with theirs:
        template = subprocess.Popen(command, cwd=_ROOT, stdin=null, stdout=null, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        template.wait()

    atexit.register(end)
    return ours
