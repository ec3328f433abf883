"""How tasks reach Dask workers: the task runner, and submission by the tags that a task needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import dask
from distributed.client import FutureCancelledError
from prefect import Task
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY
from prefect_dask import DaskTaskRunner
from prefect_dask.client import PrefectDaskClient
from prefect_dask.task_runners import PrefectDaskFuture
from pydantic import PrivateAttr

from sf_core import settings
from sf_core.config import RunConfig
from sf_core.scheduling.owners import owner_of
from sf_core.scheduling.plan import scheduler_of
from sf_core.scheduling.tags import TASK_KINDS
from sf_core.waits import waiting_for

R = TypeVar("R")

STATE_S = 5.0
"""How long a worker may take to say how a task ended."""


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
    address = scheduler_of(config) if isinstance(config, RunConfig) else settings.scheduler_address()
    if not address:
        raise ValueError("no Dask scheduler: set cluster.scheduler or SF_SCHEDULER, or start with `sf train`")
    return address


def dask_client() -> PrefectDaskClient:
    """Of the flow that asks."""
    context = FlowRunContext.get()
    assert context is not None and isinstance(context.task_runner, TaggedTaskRunner)
    return context.task_runner.client


def submit(
    task: Task[..., Any], *args: Any, worker: str | None = None, **options: Any
) -> PrefectDaskFuture[Any]:
    """Submit a task to the workers that carry the tags of its kind, or to that one of them. The run is its
    first argument, or the `run` of that. Raises KeyError for a task that sf_core.scheduling.tags does not
    know: Dask would run it anywhere."""
    kind = TASK_KINDS[task.name]
    resources = dict.fromkeys(kind.needs if worker is None else (*kind.needs, f"@{worker}"), 1)
    owner = owner_of(getattr(args[0], "run", args[0]))
    with dask.annotate(resources=resources, priority=kind.priority, owner=owner):
        return cast(PrefectDaskFuture[Any], task.submit(*args, **options))


def result_of(future: PrefectFuture[R], what: str, timeout_s: float) -> R:
    """What a task returned. Raises what it raised, or TimeoutError that says what was waited for."""
    with waiting_for(what, timeout_s) as wait:
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            wait.check()
            # it was the task that timed out
            raise


def is_known(future: PrefectDaskFuture[Any]) -> bool:
    """Whether it can be said how a task that is done ended: Dask leaves that on the task's worker, with which
    it may be lost. Raises what kept the task from running."""
    try:
        future.result(timeout=STATE_S, raise_on_failure=False)
    except TimeoutError:
        return False
    return True


class SchedulerLostError(BaseException):
    """No Exception: Prefect says of the run that it crashed, and the automation for that starts it again."""


@contextmanager
def crashing_without_scheduler() -> Iterator[None]:
    """Raises SchedulerLostError if tasks are gone because Dask's scheduler died."""
    try:
        yield
    except FutureCancelledError as error:
        if not error.reason.startswith("scheduler-"):
            raise
        raise SchedulerLostError(
            "the Dask scheduler died, and all tasks with it; started again, the run goes on with what is not "
            "committed"
        ) from None


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
    lean = context.settings.copy_with_update(updates={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with _SerialisedOnce(profile=context.profile, settings=lean):
        yield
