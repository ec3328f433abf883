"""A whole stack on this machine that stays up without a terminal: `sf up` and `sf down`.

supervisord keeps its parts running (docs/decisions/012). Everything about it is in one folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from xmlrpc.client import Fault, ServerProxy

import httpx
import psutil
from supervisor.xmlrpc import SupervisorTransport

from sf_core import parts
from sf_core.config import WorkerConfig
from sf_core.local_stack import StackError
from sf_core.parts import Part
from sf_core.scheduling.plan import read_workers
from sf_core.scheduling.worker import DASK_SETTINGS

MARK = "SF_STACK"
"""Environment variable of everything that a stack started: the stack's folder."""
MAX_SOCKET_PATH = 90
"""Bytes; Linux allows 107, and supervisord adds its process id while it opens the socket."""
STOP_S = 15.0
"""A part has so long to end before it is killed."""

HEAD = """\
[supervisord]
logfile={folder}/logs/supervisord.log
pidfile={folder}/supervisord.pid
childlogdir={folder}/logs
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
stdout_logfile={folder}/logs/{name}.log
autorestart=true
; gone within 10 s, it is started again after 1 s, then 2 s, then 3 s and so on
startsecs=10
startretries=100
stopasgroup=true
killasgroup=true
stopwaitsecs={stop_s:.0f}
"""


@dataclass(frozen=True, slots=True)
class Ports:
    prefect: int = 4200
    scheduler: int = 8786
    dataplane: int = 8700

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.prefect}/api"

    @property
    def addresses(self) -> dict[str, str]:
        """What flows and commands read from the environment."""
        return {
            "PREFECT_API_URL": self.api,
            "SF_SCHEDULER": f"tcp://127.0.0.1:{self.scheduler}",
            "SF_DATAPLANE_URL": f"http://127.0.0.1:{self.dataplane}",
        }


def up(folder: Path, workers: dict[str, WorkerConfig], ports: Ports, tell: Callable[[str], None]) -> None:
    """Start the stack and return when all of it answers. Raises StackError with one sentence; nothing of the
    stack is left then."""
    if _supervisor_pid(folder) is not None:
        raise StackError(f"the stack in {folder} is up already; `sf down` ends it")
    for port in (ports.prefect, ports.scheduler, ports.dataplane):
        _check_free(port)
    if len(os.fsencode(_socket(folder))) > MAX_SOCKET_PATH:
        raise StackError(f"{folder}: the path is too long for a socket; choose a shorter one with --folder")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **DASK_SETTINGS,
        **parts.PREFECT_SETTINGS,
        **ports.addresses,
        "PREFECT_API_SSL_CERT_FILE": parts.one_authority(folder / "authority.pem"),
        "SF_HOME": os.getcwd(),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
        MARK: str(folder),
    }
    file = folder / "supervisord.conf"
    try:
        file.write_text(configuration(folder, stack_parts(folder, workers, ports)))
        _call(environment, "supervisor.supervisord", "-c", str(file))
        tell("waiting for Prefect, Dask and the data plane")
        _await_parts(folder, set(workers), ports)
        tell("deploying")
        _call(environment, "sf_core", "setup-server")
        _call(environment, "prefect", "--no-prompt", "deploy", "--all")
    except BaseException:
        down(folder)
        raise


def stack_parts(folder: Path, workers: dict[str, WorkerConfig], ports: Ports) -> list[Part]:
    """Raises StackError for a worker whose device is not there."""
    scheduler = ["tcp://127.0.0.1:" + str(ports.scheduler)]
    try:
        dask = [parts.dask_worker(name, worker, scheduler, folder) for name, worker in workers.items()]
    except ValueError as error:
        raise StackError(f"cluster.workers: {error}") from None
    return [
        parts.prefect_server(ports.prefect, for_deployments=True),
        parts.dask_scheduler(ports.scheduler),
        parts.dataplane(folder, ports.dataplane),
        *dask,
        parts.prefect_worker("sf"),
    ]


def down(folder: Path) -> bool:
    """End everything that the stack started; False if there was nothing."""
    pid = _supervisor_pid(folder)
    if pid is not None:
        with contextlib.suppress(OSError, Fault):
            server(folder).supervisor.shutdown()
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            psutil.Process(pid).wait(STOP_S + 5)
    # what a part left behind when it was killed, or a supervisor when it was
    left = list(_marked(folder))
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    return pid is not None or bool(left)


def server(folder: Path) -> ServerProxy:
    """The supervisor's XML-RPC interface (supervisord.org/api.html), over a socket of its user alone."""
    transport = SupervisorTransport(None, None, f"unix://{_socket(folder)}")
    return ServerProxy("http://127.0.0.1", transport=transport)


def configuration(folder: Path, programs: Iterable[Part]) -> str:
    """supervisord.conf of a stack."""
    sections = [HEAD.format(folder=_escaped(str(folder)))]
    for part in programs:
        # not by supervisord's own `environment`, which cannot hold all values
        command = ["env", *(f"{key}={value}" for key, value in part.env.items()), *part.command]
        if part.gives_way:
            command = ["nice", "-n", "10", *command]
        sections.append(
            PROGRAM.format(
                name=part.name,
                command=_escaped(shlex.join(command)),
                folder=_escaped(str(folder)),
                stop_s=STOP_S,
            )
        )
    return "".join(sections)


def _escaped(value: str) -> str:
    """supervisord expands %(name)s."""
    return value.replace("%", "%%")


def _socket(folder: Path) -> str:
    return str(folder / "supervisor.sock")


def _supervisor_pid(folder: Path) -> int | None:
    with contextlib.suppress(OSError, Fault, ConnectionError):
        return int(server(folder).supervisor.getPID())  # type: ignore[arg-type]
    return None


def _marked(folder: Path) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.pid != os.getpid():
                yield process


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise StackError(
                f"port {port} is in use: end what listens there, or choose another one"
            ) from None


def _call(environment: dict[str, str], *module: str) -> None:
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise StackError(f"{' '.join(module)} failed: {said[-1] if said else done.returncode}")


def _await_parts(folder: Path, workers: set[str], ports: Ports) -> None:
    scheduler = ports.addresses["SF_SCHEDULER"]
    _await(lambda: _answers(f"{ports.api}/health"), "the Prefect server", folder)
    _await(lambda: _answers(f"{ports.addresses['SF_DATAPLANE_URL']}/metrics"), "the data plane", folder)
    _await(lambda: workers <= {worker.name for worker in read_workers(scheduler)}, "the workers", folder)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2.0).status_code < 500
    return False


def _await(probe: Callable[[], bool], what: str, folder: Path, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError, ValueError):
            if probe():
                return
        if time.monotonic() > deadline:
            raise StackError(f"{what} did not answer within {timeout_s:.0f} s; logs: {folder / 'logs'}")
        time.sleep(0.3)
