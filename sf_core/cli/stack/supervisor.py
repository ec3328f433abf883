"""Keeps processes of this machine running: configures, starts and calls supervisord (docs/decisions/012).
Every part has its own log file and process group.
"""

from __future__ import annotations

import locale
import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeVar
from xmlrpc.client import Fault, ServerProxy, Transport

import psutil

from sf_core.cli.stack.processes import Part
from sf_core.process.child_processes import MARK, end_marked, end_with
from sf_core.process.import_path import python_module
from storage.errors import StorageError
from storage.files import read_bytes, write_atomic
from storage.local import check_replaceable

T = TypeVar("T")

MAX_SOCKET_PATH = 90
"""Bytes; Linux allows 107, and supervisord adds its process id while it opens the socket."""
ANSWER_S = 90.0
"""Longest wait for an answer of supervisord, in addition to the time of the parts that it stops. A busy
machine may give it no time for long."""
REMOVALS = 3
"""Tries to remove a part, which may be restarted between its stop and its removal."""

HEAD = """\
[supervisord]
logfile={logs}/supervisord.log
pidfile={folder}/supervisord.pid
childlogdir={logs}
[unix_http_server]
file={folder}/supervisor.sock
chmod=0700
[supervisorctl]
serverurl=unix://{folder}/supervisor.sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""
PROGRAM = """\
[program:{name}]
command={command}
redirect_stderr=true
stdout_logfile={logs}/{name}.log
stopasgroup=true
killasgroup=true
stopwaitsecs={stop_s:.0f}
"""
KEPT = """\
autorestart=true
; gone within 10 s, it is started again after 1 s, then 2 s, then 3 s and so on
startsecs=10
startretries=100
"""
ONCE = """\
autorestart=false
startsecs=0
"""
ENDED = ("BACKOFF", "EXITED", "FATAL")


class StackError(RuntimeError):
    """A process of the stack failed to start or to end; the message names it, the reason and its log."""


@dataclass
class Supervisor:
    """Parts that live and end together. The supervisor ends with the command that started it, even if that is
    killed, unless it `stays`; all parts end with the supervisor."""

    folder: Path
    """Folder of its configuration and socket, where another command finds it."""
    logs: Path
    env: dict[str, str]
    """Environment variables of all parts."""
    stays: bool = False
    stop_s: float = 2.0
    """Time for a part to end before it is killed, in whole seconds."""
    processes: dict[str, Process] = field(default_factory=dict, init=False)
    _daemon: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(os.fsencode(_socket(self.folder))) > MAX_SOCKET_PATH:
            raise StackError(f"{self.folder}: the path is too long for a socket; choose a shorter path")

    def start(self, *parts: Part) -> list[Process]:
        """Start these parts, and supervisord if it does not run yet. Raises StackError if that fails."""
        started = [Process(part, self) for part in parts]
        self.processes |= {part.name: process for part, process in zip(parts, started, strict=True)}
        self.logs.mkdir(parents=True, exist_ok=True)
        programs = [process.part for process in self.processes.values()]
        text = make_configuration(self.folder, self.logs, programs, self.stop_s)
        for process in started:
            _refuse_link(self.logs, process.log)
        # supervisord reads its file in the locale's encoding
        write_atomic(str(self._configuration), text.encode(locale.getencoding(), "surrogateescape"))
        if read_pid(self.folder) is None:
            self._launch()
        else:
            call(self.folder, "reloadConfig")
            for part in parts:
                call(self.folder, "addProcessGroup", part.name)
        return started

    def await_ready(
        self, process: Process, probe: Callable[[], T | None], timeout_s: float, every_s: float = 0.1
    ) -> T:
        """Call the probe until it returns a true value, and return that. Raises StackError after the timeout,
        or when a process ends that was never ready, because it would end again."""
        deadline = time.monotonic() + timeout_s
        while not (result := probe()):
            if not process.was_ready and process.code() is not None:
                raise StackError(f"{process.name} ended: {process.tail()} ({process.log})")
            if time.monotonic() > deadline:
                raise StackError(f"{process.name} was not ready after {timeout_s:.0f} s; log: {process.log}")
            time.sleep(every_s)
        process.was_ready = True
        return result

    def pids(self) -> dict[str, int]:
        """Process ids of the parts by name; 0 for a part that does not run."""
        return {name: process.pid() for name, process in self.processes.items()}

    def remove(self, process: Process) -> None:
        """End a part for good, with its process group. Raises StackError if it does not end."""
        del self.processes[process.name]
        with suppress(OSError, HTTPException):  # the part has ended with its supervisor
            for _ in range(REMOVALS):
                with suppress(Fault):  # the part has ended by itself
                    call(self.folder, "stopProcess", process.name, patience_s=self.stop_s)
                with suppress(Fault):
                    call(self.folder, "removeProcessGroup", process.name)
                    return
            raise StackError(f"{process.name} does not stop; log: {process.log}")

    def stop(self) -> None:
        """End the supervisor and all parts."""
        end(self.folder, self.stop_s)
        if self._daemon is not None:
            self._daemon.poll()
        self.processes.clear()

    @property
    def _configuration(self) -> Path:
        return self.folder / "supervisord.conf"

    def _launch(self) -> None:
        # output of supervisord before it opens its log
        with tempfile.TemporaryFile() as output:
            self._daemon = subprocess.Popen(
                python_module(
                    "sf_core.cli.stack.supervisord_child", "-n", "-s", "-c", str(self._configuration)
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.env, MARK: str(self.folder)},
                start_new_session=True,
                preexec_fn=None if self.stays else partial(end_with, os.getpid()),
            )
            deadline = time.monotonic() + ANSWER_S
            while read_pid(self.folder) != self._daemon.pid:
                if self._daemon.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise StackError(f"supervisord does not start: {_why(output.read(), self.logs)}")
                time.sleep(0.02)


@dataclass(eq=False)
class Process:
    """A part that a supervisor keeps running, or runs once."""

    part: Part
    stack: Supervisor = field(repr=False)
    was_ready: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def log(self) -> Path:
        return self.stack.logs / f"{self.name}.log"

    def pid(self) -> int:
        """Process id; 0 while the part does not run."""
        return int(self._info()["pid"])

    def code(self) -> int | None:
        """Exit code of a part that runs once, -1 after a signal; None while it runs. For a part that is kept
        running, any number only means that it has ended."""
        info = self._info()
        return int(info["exitstatus"]) if info["statename"] in ENDED else None

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the part; returns its code. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (code := self.code()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not end within {timeout_s:.0f} s; log: {self.log}")
            time.sleep(0.1)
        return code

    def tail(self, lines: int = 5) -> str:
        text = read_bytes(str(self.log)).decode(errors="replace").strip().splitlines()
        return " | ".join(text[-lines:]) or "(empty log)"

    def _info(self) -> dict[str, Any]:
        try:
            return dict(call(self.stack.folder, "getProcessInfo", self.name))
        except (OSError, HTTPException):
            log = self.stack.logs / "supervisord.log"
            raise StackError(f"supervisord ended, and {self.name} with it; log: {log}") from None


def make_configuration(folder: Path, logs: Path, programs: Iterable[Part], stop_s: float) -> str:
    """Content of supervisord.conf for a stack."""
    folders = {"folder": _escape(str(folder)), "logs": _escape(str(logs))}
    sections = [HEAD.format(**folders)]
    for part in programs:
        # `env`, because supervisord's own `environment` cannot hold all values
        command = ["env", *(f"{key}={value}" for key, value in part.env.items()), *part.command]
        if part.gives_way:
            command = ["nice", "-n", "10", *command]
        line = _escape(shlex.join(command))
        sections.append(PROGRAM.format(name=part.name, command=line, stop_s=stop_s, **folders))
        sections.append(ONCE if part.once else KEPT)
    return "".join(sections)


def _refuse_link(folder: Path, log: Path) -> None:
    """Raises StackError if a log would be written through a link: where others may write, they would choose
    the file. supervisord refuses links too, of which it can only tell in its own log."""
    if folder.is_symlink() and folder.lstat().st_uid not in (0, os.geteuid()):
        raise StackError(f"{folder} is a link of another user: remove it")
    try:
        for path in (log, folder / "supervisord.log"):
            check_replaceable(path)
    except StorageError as error:
        raise StackError(str(error)) from None


def end(folder: Path, stop_s: float) -> bool:
    """End the supervisor of the folder and everything that it started; False if nothing was running."""
    pid = read_pid(folder)
    if pid is not None:
        with suppress(OSError, HTTPException, Fault):
            # all parts at once; `shutdown` alone stops one after the other
            call(folder, "stopAllProcesses", patience_s=stop_s)
            call(folder, "shutdown")
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            psutil.Process(pid).wait(ANSWER_S)
    # processes left behind by a killed part or supervisor
    return end_marked(str(folder)) or pid is not None


def call(folder: Path, method: str, *arguments: str, patience_s: float = 0.0) -> Any:
    """Call a method of supervisord's XML-RPC interface (supervisord.org/api.html), over a socket of its user
    alone. Raises OSError or HTTPException without an answer, Fault if supervisord refuses."""
    patience_s += ANSWER_S
    transport = _UnixTransport(_socket(folder), patience_s)
    with ServerProxy("http://localhost", transport=transport) as server:
        try:
            return getattr(server.supervisor, method)(*arguments)
        except TimeoutError:
            supervisor = f"supervisord, which runs the processes of {folder}"
            raise TimeoutError(f"{supervisor}, did not answer {method} for {patience_s:.0f} s") from None


def read_pid(folder: Path) -> int | None:
    """Process id of the supervisor of the folder, if one runs."""
    with suppress(OSError, HTTPException):
        return int(call(folder, "getPID"))
    return None


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _UnixTransport(Transport):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        self._made = _UnixConnection(path, timeout_s)

    def make_connection(self, host: Any) -> HTTPConnection:
        # attribute of the base class, which closes this connection
        self._connection = host, self._made
        return self._made


def _why(output: bytes, logs: Path) -> str:
    """The first line of supervisord's output, else a reference to its log."""
    lines = output.decode(errors="replace").strip().splitlines()
    log = logs / "supervisord.log"
    return lines[0] if lines else f"see {log}" if log.exists() else "it says nothing"


def _escape(value: str) -> str:
    """The value with % doubled, because supervisord expands %(name)s."""
    return value.replace("%", "%%")


def _socket(folder: Path) -> str:
    return str(folder / "supervisor.sock")
