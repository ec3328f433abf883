"""Starts and ends the processes that a run needs on one machine: Prefect server, Dask, data plane.

Every process gets its own session and log file, and ends when its parent does, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from sf_core import parts
from sf_core.config import WorkerConfig
from sf_core.dataplane.memory import MEMORY_MB
from sf_core.parts import PREFECT_SETTINGS, Part
from sf_core.scheduling.plan import read_workers
from sf_core.scheduling.worker import DASK_SETTINGS


class StackError(RuntimeError):
    """A process of the stack did not come up; the message names it, the reason and its log."""


@dataclass
class Process:
    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 5) -> str:
        text = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(text[-lines:]) or "(empty log)"


@dataclass
class LocalStack:
    """A set of child processes that live and die together."""

    logs: Path
    env: dict[str, str]
    processes: list[Process] = field(default_factory=list)

    def start(
        self,
        name: str,
        command: list[str],
        extra_env: Mapping[str, str] | None = None,
        *,
        gives_way: bool = False,
    ) -> Process:
        """A process that gives way gets the time that the others leave."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        with open(log, "ab") as out:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self.env, **(extra_env or {})},
                start_new_session=True,
                preexec_fn=partial(_prepare_child, gives_way) if sys.platform == "linux" else None,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def start_part(self, part: Part) -> Process:
        return self.start(part.name, part.command, part.env, gives_way=part.gives_way)

    def await_ready(self, process: Process, probe: Callable[[], str | None], timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (code := process.popen.poll()) is not None:
                raise StackError(f"{process.name} ended with code {code}: {process.tail()} ({process.log})")
            if (value := probe()) is not None:
                return value
            time.sleep(0.1)
        raise StackError(f"{process.name} was not ready after {timeout_s:.0f} s ({process.log})")

    def stop(self, grace_s: float = 2.0) -> None:
        """End every process and what it started: politely first, after `grace_s` by force."""
        _end([process.popen for process in self.processes], grace_s)
        self.processes.clear()

    def stop_one(self, process: Process, grace_s: float = 1.5) -> None:
        _end([process.popen], grace_s)
        self.processes.remove(process)


@contextlib.contextmanager
def local_stack(logs: Path, env: Mapping[str, str] | None = None) -> Iterator[LocalStack]:
    stack = LocalStack(logs, {**os.environ, **DASK_SETTINGS, **PREFECT_SETTINGS, **(env or {})})
    try:
        yield stack
    finally:
        stack.stop()


def start_prefect_server(stack: LocalStack, *, for_deployments: bool = False) -> Callable[[], str]:
    """Start a server; the returned function waits for it and gives its API URL."""
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    process = stack.start_part(parts.prefect_server(port, for_deployments=for_deployments))

    def ready() -> str | None:
        with contextlib.suppress(httpx.HTTPError):
            return api if httpx.get(f"{api}/health", timeout=1.0).is_success else None
        return None

    return lambda: stack.await_ready(process, ready, 120.0)


def start_dask(stack: LocalStack, workers: Mapping[str, WorkerConfig], directory: Path) -> Callable[[], str]:
    """Start a scheduler and tagged workers; the returned function waits and gives the address."""
    file = directory / "scheduler.json"
    file.unlink(missing_ok=True)
    scheduler = stack.start_part(parts.dask_scheduler(0, "--scheduler-file", str(file)))

    def address() -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads(file.read_text())["address"])
        return None

    for name, worker in workers.items():
        start_dask_worker(stack, name, worker, ["--scheduler-file", str(file)], directory)
    return lambda: stack.await_ready(scheduler, address, 60.0)


def start_dask_worker(
    stack: LocalStack, name: str, worker: WorkerConfig, scheduler: Iterable[str], directory: Path
) -> Process:
    try:
        part = parts.dask_worker(name, worker, scheduler, directory)
    except ValueError as error:
        raise StackError(f"worker {name}: {error}") from None
    return stack.start_part(part)


def start_dataplane(
    stack: LocalStack,
    directory: Path,
    port: int = 0,
    memory_mb: float = MEMORY_MB,
    num_gateways: int = 1,
) -> Callable[[], str]:
    """Start a data plane on loopback; the returned function waits and gives its URL. Started again in the
    same directory, on the same port, it goes on where it was killed."""
    file = parts.port_file(directory)
    file.unlink(missing_ok=True)
    part = parts.dataplane(directory, port, memory_mb=memory_mb, num_gateways=num_gateways)
    process = stack.start_part(part)

    def url() -> str | None:
        with contextlib.suppress(OSError, ValueError):
            return f"http://127.0.0.1:{int(file.read_text())}"
        return None

    return lambda: stack.await_ready(process, url, 60.0)


@dataclass(frozen=True, slots=True)
class Services:
    """Where the parts of a stack answer."""

    api: str
    """Prefect API."""
    scheduler: str
    dataplane: str

    @property
    def addresses(self) -> dict[str, str]:
        """What flows and commands read from the environment."""
        return {
            "PREFECT_API_URL": self.api,
            "SF_SCHEDULER": self.scheduler,
            "SF_DATAPLANE_URL": self.dataplane,
        }


def start_services(
    stack: LocalStack,
    directory: Path,
    workers: Mapping[str, WorkerConfig],
    *,
    api: str | None = None,
    scheduler: str | None = None,
    dataplane: str | None = None,
) -> Services:
    """Start, side by side, what has no address yet; returns when all of it answers and all workers joined."""
    if api is None and scheduler is None:
        stack.env["PREFECT_API_SSL_CERT_FILE"] = parts.one_authority(directory / "authority.pem")
    prefect = None if api else start_prefect_server(stack)
    dask = None if scheduler else start_dask(stack, workers, directory)
    gateway = None if dataplane else start_dataplane(stack, directory)
    if dask is not None:
        scheduler = dask()
        _await_workers(scheduler, set(workers), 120.0)
    dataplane = dataplane or (gateway() if gateway else None)
    api = api or (prefect() if prefect else None)
    assert api and scheduler and dataplane
    return Services(api, scheduler, dataplane)


def _await_workers(scheduler: str, names: set[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while missing := names - {worker.name for worker in read_workers(scheduler)}:
        if time.monotonic() > deadline:
            raise StackError(f"workers {sorted(missing)} did not join within {timeout_s:.0f} s")
        time.sleep(0.3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(popen: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, number)


def _end(popens: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    living = [popen for popen in popens if popen.poll() is None]
    for popen in living:
        _signal_group(popen, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for popen in living:
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(max(0.05, deadline - time.monotonic()))
    for popen in popens:
        # also after a polite end: a child of the process may still be there
        _signal_group(popen, signal.SIGKILL)
        popen.wait()


def _prepare_child(gives_way: bool) -> None:
    """Have it end with its parent, and run at its priority."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if gives_way:
        os.nice(10)
        # where Linux shares the machine out by session, the session has a priority too
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("10")
