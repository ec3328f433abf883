"""How tasks reach Dask workers: the task runner and the lanes. A lane is a tag, or a tag on one worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import dask
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY
from prefect_dask import DaskTaskRunner
from prefect_dask.client import PrefectDaskClient
from pydantic import PrivateAttr

from sf_core.waits import waiting_for

R = TypeVar("R")

SCHEDULER_VARIABLE = "SF_SCHEDULER"
"""Address of the scheduler for flows whose configuration names none."""


class TaggedTaskRunner(DaskTaskRunner):
    """A DaskTaskRunner that learns its scheduler from the flow's `config` when the first task is submitted.

    An address in a decorator would be fixed when the module is imported, before any configuration is read.
    """

    @property
    def client(self) -> PrefectDaskClient:
        if self.address is None:
            self.address = scheduler_address()
        return super().client


def scheduler_address() -> str:
    """Raises ValueError if neither the flow's configuration nor the environment names a scheduler."""
    context = FlowRunContext.get()
    config = (context.parameters or {}).get("config") if context else None
    address = getattr(getattr(config, "cluster", None), "scheduler", None) or os.environ.get(
        SCHEDULER_VARIABLE
    )
    if not address:
        raise ValueError(
            f"no Dask scheduler: set cluster.scheduler or {SCHEDULER_VARIABLE}, or start with `sf train`"
        )
    return address


@contextmanager
def lane(tag: str, worker: str | None = None, priority: int = 0) -> Iterator[None]:
    """Everything submitted inside runs on a worker that carries `tag`, or on that worker only."""
    resources = {tag: 1} if worker is None else {tag: 1, f"@{worker}": 1}
    with dask.annotate(resources=resources, priority=priority):
        yield


def result_of(future: PrefectFuture[R], what: str, timeout_s: float) -> R:
    """What a task returned. Raises what it raised, or TimeoutError that says what was waited for."""
    with waiting_for(what, timeout_s) as wait:
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            wait.check()
            # it was the task that timed out
            raise


class _SerialisedOnce(SettingsContext):
    """Settings are constant, sent with every task, and take 0.1 s of CPU to write out."""

    _serialised: dict[str, Any] | None = PrivateAttr(None)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        if self._serialised is None:
            self._serialised = super().serialize(include_secrets=include_secrets)
        return self._serialised


@contextmanager
def lean_settings() -> Iterator[None]:
    """For the subflows of a flow: no heartbeats of their own, because ending each takes up to a second and
    the parent's tell the same, and settings that are written out once."""
    context = get_settings_context()
    settings = context.settings.copy_with_update(updates={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with _SerialisedOnce(profile=context.profile, settings=settings):
        yield
