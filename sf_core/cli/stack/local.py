"""Starts and awaits the services of a run on one machine: Prefect server, Dask, data plane.

The address of a service is chosen before it starts and stays the same when it is restarted.
"""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from sf_core.cli.stack import processes
from sf_core.cli.stack.processes import PREFECT_SETTINGS, Part
from sf_core.cli.stack.supervisor import Process, StackError, Supervisor
from sf_core.config import WorkerConfig
from sf_core.config.addresses import LOOPBACK
from sf_core.dataplane.options import DataplaneOptions
from sf_core.process.import_path import module_environment
from sf_core.scheduling.cluster import read_workers
from sf_core.scheduling.worker import DASK_SETTINGS

START_S = 300.0
"""Longest wait for a service to answer after its start."""


@contextlib.contextmanager
def local_stack(logs: Path, env: Mapping[str, str] | None = None) -> Iterator[Supervisor]:
    """A supervisor that ends with the context, or with this process."""
    # not beside the logs: the path of a socket must be short
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        stack = Supervisor(Path(folder), logs, {**stack_environment(), **(env or {})})
        try:
            yield stack
        finally:
            stack.stop()


def stack_environment() -> dict[str, str]:
    """Environment variables of all parts, which find the user's modules in the current folder."""
    return {**module_environment(), **DASK_SETTINGS, **PREFECT_SETTINGS}


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on loopback of the services of a stack."""

    prefect: int
    scheduler: int
    dataplane: int

    @classmethod
    def free(cls) -> Ports:
        first = free_port(3)
        return cls(first, first + 1, first + 2)

    @property
    def services(self) -> Services:
        return Services(
            f"http://127.0.0.1:{self.prefect}/api",
            f"tcp://127.0.0.1:{self.scheduler}",
            f"http://127.0.0.1:{self.dataplane}",
        )


@dataclass(frozen=True, slots=True)
class Services:
    """Addresses of the services of a stack."""

    api: str
    """URL of the Prefect API."""
    scheduler: str
    dataplane: str

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses as environment variables of flows and commands."""
        return {
            "PREFECT_API_URL": self.api,
            "SF_SCHEDULER": self.scheduler,
            "SF_DATAPLANE_URL": self.dataplane,
        }


def name_started(api: str | None, scheduler: str | None, dataplane: str | None) -> str:
    """The services that `start_services` starts, in words; empty if all have an address."""
    addresses = {"Prefect": api, "Dask": scheduler, "the data plane": dataplane}
    names = [name for name, address in addresses.items() if address is None]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def start_services(
    stack: Supervisor,
    directory: Path,
    workers: Mapping[str, WorkerConfig],
    *,
    api: str | None = None,
    scheduler: str | None = None,
    dataplane: str | None = None,
    ports: Ports | None = None,
    for_deployments: bool = False,
) -> Callable[[], Services]:
    """Start the services without an address, concurrently. The returned function waits until they answer and
    all workers have joined; it can be called again after restarts."""
    ports = ports or Ports.free()
    if api is None and scheduler is None:
        stack.env |= processes.client_settings(directory / "authority.pem")
    prefect = dask = plane = None
    if api is None:
        prefect = start_prefect_server(stack, ports.prefect, for_deployments=for_deployments)
    if scheduler is None:
        dask = start_dask(stack, workers, directory, ports.scheduler)
    if dataplane is None:
        plane = start_dataplane(stack, directory, ports.dataplane)
    chosen = ports.services
    services = Services(api or chosen.api, scheduler or chosen.scheduler, dataplane or chosen.dataplane)

    def ready() -> Services:
        for wait in filter(None, (dask, plane, prefect)):
            wait()
        return services

    return ready


def start_prefect_server(
    stack: Supervisor, port: int | None = None, *, for_deployments: bool = False
) -> Callable[[], str]:
    """Start a Prefect server; the returned function waits for it and returns its API URL."""
    port = port or free_port()
    api = f"http://{LOOPBACK}:{port}/api"
    [process] = stack.start(processes.prefect_server(port, for_deployments=for_deployments))

    def ready() -> str:
        stack.await_ready(process, lambda: _answers(f"{api}/health"), START_S)
        return api

    return ready


def start_dask(
    stack: Supervisor, workers: Mapping[str, WorkerConfig], directory: Path, port: int | None = None
) -> Callable[[], str]:
    """Start a scheduler and tagged workers; the returned function waits for all and returns the address."""
    port = port or free_port()
    address = f"tcp://{LOOPBACK}:{port}"
    started = [_worker(name, worker, address, directory) for name, worker in workers.items()]
    scheduler, *devices = stack.start(processes.dask_scheduler(port), *started)

    def ready() -> str:
        stack.await_ready(scheduler, lambda: _accepts(port), START_S)
        await_workers(stack, address, dict(zip(workers, devices, strict=True)))
        return address

    return ready


def start_dask_worker(
    stack: Supervisor, name: str, worker: WorkerConfig, scheduler: str, directory: Path
) -> Process:
    """Start one more worker. Raises StackError if its device does not exist."""
    [process] = stack.start(_worker(name, worker, scheduler, directory))
    return process


def await_workers(stack: Supervisor, scheduler: str, devices: Mapping[str, Process]) -> None:
    """Wait until the workers of these names have joined. Raises StackError for the first that does not."""
    joined: set[str] = set()

    def is_ready(name: str) -> bool:
        if name not in joined:
            # a restarted scheduler may not answer yet
            with contextlib.suppress(ValueError):
                joined.update(worker.name for worker in read_workers(scheduler))
        return name in joined

    for name, process in devices.items():
        # a query takes tens of milliseconds on a machine that is busy with starting up
        stack.await_ready(process, partial(is_ready, name), START_S, every_s=0.3)


def start_dataplane(
    stack: Supervisor,
    directory: Path,
    port: int | None = None,
    memory_mb: float = DataplaneOptions.memory_mb,
) -> Callable[[], str]:
    """Start a data plane on loopback; the returned function waits for it and returns its URL. Restarted in
    the same directory, on the same port, it continues where it was killed."""
    port = port or free_port()
    url = f"http://{LOOPBACK}:{port}"
    [process] = stack.start(processes.dataplane(directory, port, memory_mb=memory_mb))

    def ready() -> str:
        stack.await_ready(process, lambda: _answers(f"{url}/metrics"), START_S)
        return url

    return ready


def free_port(successive: int = 1) -> int:
    """First of so many successive ports that are free; none of those that the system gives out by itself."""
    while True:
        # tests seed the common generator
        first = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in range(first, first + successive):
                sockets.enter_context(socket.create_server((LOOPBACK, port)))
            return first


def _worker(name: str, worker: WorkerConfig, scheduler: str, directory: Path) -> Part:
    try:
        return processes.dask_worker(name, worker, [scheduler], directory)
    except ValueError as error:
        raise StackError(f"worker {name}: {error}") from None


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        # no proxy of the environment can reach loopback
        return httpx.get(url, timeout=2.0, trust_env=False).status_code < 500
    return False


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=2.0):
        return True
    return False
