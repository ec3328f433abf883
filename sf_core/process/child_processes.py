"""How processes that we start are ended, with everything that they have started, even after kill -9.

- A program of others (a command as agent, a vLLM server) is started by `start_kept`, under a keeper: a
  process that ends the program and all its descendants when the program ends or its starter does. Orphans
  become children of the keeper, even in sessions of their own, so none escapes.
- Our own processes, the parts of a stack, call `end_with` when they are forked: the kernel terminates them
  when their parent ends. They also bear the mark of their stack in their environment, by which `end_marked`
  finds what is left.
- Code that models write runs in a sandbox, whose first process is agents/sandbox/porter.py: the kernel ends
  everything in its process namespace when it ends.

This file is also the keeper's program, so that at its start it imports the standard library alone:

    python -I -S child_processes.py CHANNEL GRACE_S FOLDER COMMAND...

CHANNEL is a socket whose other end only the starter holds: the kernel closes it however the starter ends. On
the channel the keeper writes a line of JSON when the command has started and one when its family is gone.
Then, unless FOLDER is empty, it waits for the end of the channel and removes the folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

# not that of `typing`, whose import takes a sixth of a keeper's start
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import psutil

MARK = "SF_STACK"
"""Environment variable with the folder of the stack, set in every process that the stack started."""

FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""Environment variable of processes that work on a flow run of a deployment; set by Prefect."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

LOOK_S = 0.05
"""Seconds between looks at a family that is to end; a child that ends is noticed at once."""

TRACKERS_S = 10.0
"""Seconds that Python's resource trackers have, once all others have ended, to remove what these left in
shared memory. They are not waited for without end, because any command can look like one."""

_TRACKER = re.compile(rb"from [\w.]+\.resource_tracker import main; ?main\(\d+.*\)")
"""Last word of a tracker's command line; also of those of loky."""


def start_kept(
    command: Sequence[str], *, grace_s: float = 0.0, folder: str = "", **options: Any
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a command under a keeper; returns our end of the channel, and the keeper. `grace_s`: time between
    SIGTERM and SIGKILL; 0: no SIGTERM. `options` are those of subprocess.Popen."""
    ours, theirs = socket.socketpair()
    with theirs:
        facts = [str(theirs.fileno()), str(grace_s), folder]
        words = [sys.executable, "-I", "-S", __file__, *facts, *command]
        return ours, subprocess.Popen(words, pass_fds=[theirs.fileno()], start_new_session=True, **options)


def await_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """Return when a keeper whose channel is closed has ended the family. A keeper that was killed has ended
    nobody: then its process group is killed."""
    if keeper.wait() != 0:
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)


def is_keeper(command_line: Sequence[str]) -> bool:
    return __file__ in command_line


def end_with(parent: int) -> None:
    """Have this process, a fork of the parent, terminated when the parent ends, also if it has ended already;
    only on Linux."""
    if sys.platform == "linux":
        # the parent's handler, which is here until this process becomes another program, might do nothing
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            signal.raise_signal(signal.SIGTERM)


def end_marked(folder: str) -> bool:
    """Kill all processes with the mark of the stack except this one; False if there are none."""
    import psutil

    found = []
    for process, mark in find_carriers(MARK):
        if mark == folder and process.pid != os.getpid():
            with suppress(psutil.Error):
                # they end by themselves when their worker has, with those of their family that bear no mark
                if not is_keeper(process.cmdline()):
                    process.kill()
                found.append(process)
    _, survivors = psutil.wait_procs(found, timeout=5)
    for process in survivors:
        with suppress(psutil.Error):
            process.kill()
    return bool(found)


def find_carriers(variable: str) -> Iterator[tuple[psutil.Process, str]]:
    """Processes of this machine with this environment variable, and its value, as far as this process may
    inspect them."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if value := process.environ().get(variable):
                yield process, value


class Keeper:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._wake, waker = os.pipe()
        for end in (self._wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker)
        # sent to a whole control group or session, they reach the worker too, whose end is what counts. A
        # handler does not pass on to the command, as ignoring them would
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._command: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._told: set[int] = set()

    def run(self, grace_s: float, folder: str, words: Sequence[str]) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._command = subprocess.Popen(words)
        except OSError as error:
            self._tell(error=str(error))
        else:
            self._tell(error=None)
            # of the folder that will be removed
            os.chdir("/")
            is_attended = True
            while self._reap() and self._status is None and is_attended:
                is_attended = not self._doze(None, self._channel)
            self._end(grace_s)
            self._tell(status=self._status)
        if folder:
            with suppress(OSError):
                while self._channel.recv(64):
                    pass
            remove(folder)

    def _end(self, grace_s: float) -> None:
        """Return when no process of the family is left."""
        began = time.monotonic()
        last_other = began
        while self._reap():
            now = time.monotonic()
            trackers, others = family()
            if others:
                last_other = now
            if now < began + grace_s:
                self._signal([pid for pid in others if pid not in self._told], signal.SIGTERM)
                self._told.update(others)
            else:
                self._signal(others, signal.SIGKILL)
            if now > last_other + TRACKERS_S:
                self._signal(trackers, signal.SIGKILL)
            self._doze(LOOK_S)

    def _signal(self, pids: Sequence[int], number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _reap(self) -> bool:
        """Take note of the children that have ended; returns whether there are others."""
        assert self._command is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._command.pid:
                self._status = self._command.returncode = os.waitstatus_to_exitcode(status)

    def _doze(self, timeout_s: float | None, channel: socket.socket | None = None) -> bool:
        """Wait for a signal, the end of the channel or the time; returns whether the channel has ended."""
        sources = select.poll()
        for number in (self._wake, *([channel.fileno()] if channel else [])):
            sources.register(number, select.POLLIN)
        ready = sources.poll(None if timeout_s is None else timeout_s * 1000)
        with suppress(BlockingIOError):
            while os.read(self._wake, 512):
                pass
        return any(number != self._wake for number, _ in ready)

    def _tell(self, **facts: str | int | None) -> None:
        with suppress(OSError):
            self._channel.sendall(json.dumps(facts).encode() + b"\n")


def family() -> tuple[list[int], list[int]]:
    """Descendants of this process: Python's resource trackers, and the others. What has no command line
    counts as a tracker: one that is being started has none for an instant."""
    children: dict[int, list[int]] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        # what has ended meanwhile cannot be read
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            parent = file.read().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(pid)
    found = [os.getpid()]
    trackers = list[int]()
    others = list[int]()
    for pid in found:
        for child in children.get(pid, ()):
            found.append(child)
            with suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
                last_word = file.read().rstrip(b"\0").rpartition(b"\0")[2]
                is_tracker = not last_word or _TRACKER.fullmatch(last_word)
                (trackers if is_tracker else others).append(child)
    return trackers, others


def remove(folder: str) -> None:
    """Remove a folder as far as it can be, its unreadable parts too."""
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                with suppress(OSError):
                    os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        Keeper(channel).run(float(sys.argv[2]), sys.argv[3], sys.argv[4:])
