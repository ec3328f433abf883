"""Whether the services answer that settings and variables name. A command that starts no service of its own
would otherwise notice only after it has started everything else, or wait for long."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from sf_core.config import RunConfig
from sf_core.config.addresses import without_password
from sf_core.dataplane.control.client import tls
from sf_core.process.environment_variables import dataplane_url, prefect_api_url, scheduler_address

CONNECT_S = 3.0
"""Longest wait for a connection."""

ANSWER_S = 10.0
"""Longest wait for an answer on a connection: a busy server on a slow machine takes seconds."""


class Service(NamedTuple):
    """A service at an address that the user has named."""

    kind: str
    address: str
    named_by: str
    """The variable, setting or option with the address."""

    def check(self, *, is_needed: bool = False) -> None:
        """Raises ValueError, one sentence, if no service of this kind answers at the address. `is_needed`:
        the command cannot do without this service."""
        fault = _PROBES[self.kind](self.address)
        if fault is None:
            return
        remedy = f"start that {self.kind}, or correct {self.named_by}"
        if self.named_by.isupper() and not is_needed:
            remedy = f"start that {self.kind}, or unset {self.named_by}"
        raise ValueError(f"{self.named_by} names {without_password(self.address)}, but {fault}: {remedy}")


def check_services(config: RunConfig) -> None:
    """Raises ValueError, one sentence, for the first service of a run that does not answer."""
    for service in _services_of(config):
        service.check()


def check_scheduler(config: RunConfig, option: str | None = None) -> None:
    """Raises ValueError, one sentence, if the Dask scheduler of a run does not answer. `given`: the one that
    the option --scheduler names instead."""
    if (service := _scheduler_of(config, option)) is not None:
        service.check()


def require_prefect() -> None:
    """Raises ValueError, one sentence, if PREFECT_API_URL names no Prefect server that answers."""
    if (api := prefect_api_url()) is None:
        raise ValueError(
            "PREFECT_API_URL is not set: set it to the Prefect server, for example http://127.0.0.1:4200/api"
        )
    Service(PREFECT, api, "PREFECT_API_URL").check(is_needed=True)


def _services_of(config: RunConfig) -> Iterator[Service]:
    if (api := prefect_api_url()) is not None:
        yield Service(PREFECT, api, "PREFECT_API_URL")
    if (scheduler := _scheduler_of(config)) is not None:
        yield scheduler
    if config.dataplane.url is not None:
        yield Service(DATA_PLANE, config.dataplane.url, "dataplane.url")
    elif (url := dataplane_url()) is not None:
        yield Service(DATA_PLANE, url, "SF_DATAPLANE_URL")


def _scheduler_of(config: RunConfig, option: str | None = None) -> Service | None:
    named = {
        "--scheduler": option,
        "cluster.scheduler": config.cluster.scheduler,
        "SF_SCHEDULER": scheduler_address(),
    }
    candidates = ((name, address) for name, address in named.items() if address)
    return next((Service(SCHEDULER, address, name) for name, address in candidates), None)


def _probe_prefect(api: str) -> str | None:
    """Why this is not the API of a Prefect server; None if it seems to be."""
    answer = _ask(f"{api.rstrip('/')}/health", verify=False)
    if isinstance(answer, str):
        return answer
    # the server's pages answer every other path
    if answer.status_code == 404 or (answer.is_success and not _is(answer, "application/json")):
        return "the server there has no Prefect API at this path (the address usually ends in /api)"
    return None


def _probe_dataplane(url: str) -> str | None:
    answer = _ask(f"{url.rstrip('/')}/metrics", verify=True)
    if isinstance(answer, str):
        return answer
    if answer.status_code == 404 or _is(answer, "text/html"):
        return "the server there is no data plane"
    return None


def _probe_scheduler(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        host = parts.hostname
        port = parts.port
    except ValueError:
        return None  # Dask's client tells what is wrong with the address
    if parts.scheme not in ("tcp", "tls") or host is None or port is None:
        return None
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        return _nothing_answers(error)
    return None


def _ask(url: str, *, verify: bool) -> httpx.Response | str:
    """The answer, or why there is none. `verify` false: nothing secret is sent, and other settings decide
    which certificates the server's own clients accept."""
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    try:
        # no proxy of the environment: `reach_directly` exempts these addresses
        with httpx.Client(verify=tls() if verify else False, timeout=timeout, trust_env=False) as http:
            answer = http.get(url)
    except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
        return _nothing_answers(error)
    if answer.status_code >= 500:
        return f"the server there answers with status {answer.status_code}"
    return answer


def _nothing_answers(error: Exception) -> str:
    return f"nothing answers there ({str(error) or type(error).__name__})"


def _is(answer: httpx.Response, media: str) -> bool:
    return answer.headers.get("content-type", "").startswith(media)


PREFECT = "Prefect server"
SCHEDULER = "Dask scheduler"
DATA_PLANE = "data plane"
_PROBES = {PREFECT: _probe_prefect, SCHEDULER: _probe_scheduler, DATA_PLANE: _probe_dataplane}
