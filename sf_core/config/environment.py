"""The only place that reads the environment. Everything else gets values passed."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit


def dataplane_key() -> str | None:
    """Key of the data plane (SF_DATAPLANE_KEY); travels in the environment, never in parameters or files."""
    return os.environ.get("SF_DATAPLANE_KEY") or None


def run_key() -> str | None:
    """Key of the run that this process starts (SF_RUN_KEY). Only the flow needs it: the data plane tells it
    to the agent runners of the run."""
    return os.environ.get("SF_RUN_KEY") or None


def cache_dir() -> Path:
    """Where warm-started policies are kept between runs (SF_CACHE_DIR, else the user's cache folder)."""
    if path := os.environ.get("SF_CACHE_DIR"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seamlessflow"


def dataplane_url() -> str | None:
    """The data plane of the cluster (SF_DATAPLANE_URL), for configurations that name none."""
    return os.environ.get("SF_DATAPLANE_URL") or None


def scheduler_address() -> str | None:
    """The Dask scheduler of the cluster (SF_SCHEDULER), for configurations that name none."""
    return os.environ.get("SF_SCHEDULER") or None


def prefect_api_url() -> str | None:
    """The Prefect server that the user chose, if any."""
    return os.environ.get("PREFECT_API_URL") or None


def prefect_password() -> str | None:
    """USER:PASSWORD that a Prefect server asks for (PREFECT_SERVER_API_AUTH_STRING), if any. Its clients send
    PREFECT_API_AUTH_STRING."""
    return os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or None


def command_started_at() -> float | None:
    """Unix seconds at which the command was called that started this flow (SF_STARTED_AT), so that start-up
    counts; None for a deployment."""
    value = os.environ.get("SF_STARTED_AT")
    return float(value) if value else None


def computes_nothing() -> bool:
    """Whether workers start without the libraries that compute (SF_EMULATED=1): those of emulated runs."""
    return os.environ.get("SF_EMULATED") == "1"


def prefect_home() -> Path:
    """Where Prefect keeps its database (PREFECT_HOME, else ~/.prefect)."""
    return Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")


def reach_directly(*urls: str | None) -> None:
    """Except this machine and these servers from the proxies that the environment names, for this process and
    what it starts (NO_PROXY): no proxy reaches them, and most wait long before they say so."""
    if not urllib.request.getproxies():
        return
    hosts = ["127.0.0.1", "localhost", "::1", *(urlsplit(url).hostname or "" for url in urls if url)]
    named = f"{os.environ.get('NO_PROXY', '')},{os.environ.get('no_proxy', '')}"
    excepted = ",".join(filter(None, dict.fromkeys([*map(str.strip, named.split(",")), *hosts])))
    # some libraries read one, some the other
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = excepted


def visible_cuda_devices() -> list[str] | None:
    """The CUDA devices that this process was given, by a batch system for example; None if all."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]
