"""Command and environment of each process of a stack on one machine. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import certifi

from sf_core.config import WorkerConfig
from sf_core.config.addresses import LOOPBACK, is_loopback
from sf_core.dataplane.options import DataplaneOptions
from sf_core.process.import_path import python_module
from sf_core.scheduling.worker import LOG_SETTINGS, NO_DASHBOARD, worker_command, worker_environment
from storage.files import write_atomic

SERVER_SETTINGS = {
    # on SQLite the server refuses one of two simultaneous writers, and the flow would retry only seconds
    # later: states of tasks and events are written in batches every few seconds (docs/decisions/002)
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
}
PREFECT_WORKER = "prefect-worker"
PREFECT_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    **LOG_SETTINGS,
    # manifests decide which stages are done; a cached result could be of another iteration
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_TASKS_REFRESH_CACHE": "true",
}


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of all parts."""
    gives_way: bool = False
    """Whether it runs at a lower CPU priority than the other parts."""
    once: bool = False
    """Whether it runs once, and is not restarted when it ends."""


def prefect_server(port: int, *, host: str = LOOPBACK, for_deployments: bool) -> Part:
    """A Prefect server; only one for deployments schedules, finds late runs and acts on events."""
    unused = ("SCHEDULER", "LATE_RUNS", "PAUSE_EXPIRATIONS", "CANCELLATION_CLEANUP", "FOREMAN", "TRIGGERS")
    env = {} if for_deployments else {f"PREFECT_SERVER_SERVICES_{s}_ENABLED": "false" for s in unused}
    api = f"http://{host}:{port}/api"
    env |= SERVER_SETTINGS | {"PREFECT_API_URL": api, "PREFECT_UI_API_URL": api}
    env |= {"PREFECT_SERVER_API_HOST": host, "PREFECT_SERVER_API_PORT": str(port)}
    # a page of another origin could otherwise start runs (docs/decisions/060)
    own_ui = ",".join(f"http://{name}:{port}" for name in dict.fromkeys((LOOPBACK, "localhost", host)))
    env |= {"PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": own_ui}
    env |= {"PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true"}
    app = ("--factory", "tasks.prefect_server:create_app", "--log-level", "warning")
    # uvicorn imports from the current folder first, unless another place is named
    where = ("--app-dir", os.devnull, "--host", host, "--port", str(port))
    return Part("prefect-server", python_module("uvicorn", *app, *where), env)


def prefect_worker(pool: str) -> Part:
    """A Prefect worker: takes flow runs of the pool from PREFECT_API_URL and starts a process for each."""
    command = python_module("prefect", "worker", "start", "--pool", pool, "--type", "process")
    # without it, a script that Prefect starts by its path would import the storage.py beside it, not ours
    return Part(PREFECT_WORKER, command, {"PYTHONSAFEPATH": "1"})


def dask_scheduler(port: int, *, host: str = LOOPBACK) -> Part:
    """A Dask scheduler; with TLS if other machines can reach it."""
    command = python_module("dask", "scheduler", "--host", host, "--port", str(port), *NO_DASHBOARD)
    protocol = [] if is_loopback(host) else ["--protocol", "tls"]
    return Part("dask-scheduler", [*command, *protocol])


def dask_worker(name: str, worker: WorkerConfig, scheduler: Iterable[str], directory: Path) -> Part:
    """A Dask worker; `scheduler` are arguments for its address. Raises ValueError for a missing device."""
    return Part(
        f"worker-{name}",
        worker_command(name, worker.tags, scheduler) + ["--local-directory", str(directory / "dask")],
        worker_environment(worker),
        # workers share the cores of this machine, where training has priority over rollout
        gives_way="rollout" in worker.tags and "train" not in worker.tags,
    )


def dataplane(directory: Path, port: int, *, memory_mb: float = DataplaneOptions.memory_mb) -> Part:
    """A data plane with its journal in the directory."""
    options = ["--port", str(port), "--journal-dir", str(directory / "dataplane")]
    options += ["--memory-mb", str(memory_mb)]
    return Part("dataplane", python_module("sf_core", "dataplane", *options))


def client_settings(authority: Path) -> dict[str, str]:
    """Settings of clients of our Prefect server, which requires CSRF tokens. It speaks plain HTTP, and to
    read all authorities in each task takes 20 ms: writes `authority` with only one of them."""
    end = "-----END CERTIFICATE-----\n"
    write_atomic(str(authority), (certifi.contents().partition(end)[0] + end).encode())
    return {"PREFECT_API_SSL_CERT_FILE": str(authority), "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "true"}
