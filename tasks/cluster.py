"""Submits Prefect tasks to Dask workers: the task runner, and submission by the tag that a task needs."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar, cast
from uuid import uuid4

import dask
import httpx
from distributed import Client, Future
from distributed.client import FutureCancelledError
from distributed.scheduler import KilledWorker, NoValidWorkerError
from prefect import Task
from prefect.client.schemas.objects import RunInput
from prefect.context import (
    AssetContext,
    FlowRunContext,
    SettingsContext,
    get_settings_context,
    serialize_context,
)
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY
from prefect.task_engine import run_task_sync
from prefect.utilities.engine import collect_task_run_inputs_sync
from prefect_dask import DaskTaskRunner
from prefect_dask.client import PrefectDaskClient
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.config import RunConfig
from sf_core.process import environment_variables
from sf_core.process.environment_variables import own_workers
from sf_core.scheduling.cluster import list_connected, owner_of, scheduler_of
from sf_core.scheduling.leases import LeaseEnd
from sf_core.scheduling.plan import TASK_KINDS, Worker
from sf_core.stages.run import OpenRun, RunRef
from sf_core.waits import waiting_for

R = TypeVar("R")

is_waiting = threading.Event()
"""Set while the flow of this process waits for a task and so sends nothing to the Prefect server."""

STATE_S = 5.0
"""Longest that a worker may take to report how a task ended."""

LOSSES = (NoValidWorkerError, KilledWorker, ConnectionError, httpx.TransportError)
"""Errors of a lease through no fault of its own: its worker was away for long or died repeatedly, or the data
plane did not answer."""

TaskFuture = PrefectDaskFuture[Any]


class TaggedTaskRunner(DaskTaskRunner):
    """A DaskTaskRunner that learns its scheduler from the flow's `config` when the first task is submitted.

    An address in a decorator would be fixed when the module is imported, before any configuration is read.
    """

    @property
    def client(self) -> PrefectDaskClient:
        if self.address is None:
            self.address = scheduler_address()
        return super().client

    def submit(  # type: ignore[override]
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[TaskFuture] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> TaskFuture:
        """Like DaskTaskRunner.submit for tasks that are no coroutines, but with less to serialise: flow and
        task by name, the context of the flow once, and a key that does not hash all arguments."""
        task_run_id = uuid4()
        known_dependencies = dependencies or {}
        inputs = {
            name: collect_task_run_inputs_sync(value, future_cls=Future) | known_dependencies.get(name, set())
            for name, value in parameters.items()
        }
        assets = AssetContext.from_task_and_inputs(task, task_run_id, inputs, copy_to_child_ctx=True)
        future = Client.submit(
            self.client,
            run_task_sync,
            key=f"{task.name}-{task_run_id}",
            task=_by_name(task),
            task_run_id=task_run_id,
            parameters=self._optimize_futures(parameters),
            wait_for=self._optimize_futures(wait_for) if wait_for else None,
            return_type="state",
            dependencies=inputs,
            context=self._context | {"asset_context": assets.serialize()},
        )
        return PrefectDaskFuture(wrapped_future=future, task_run_id=task_run_id)

    @cached_property
    def _context(self) -> dict[str, Any]:
        """Context of the flow run that is sent with its tasks. Each flow run has its own task runner."""
        context = serialize_context()
        flow_run = context["flow_run_context"]
        return context | {"flow_run_context": flow_run | {"flow": _by_name(flow_run["flow"])}}


class _Named:
    """Pickles an object as a reference to its module. cloudpickle would send the code of a function that a
    decorator has replaced in its module, with everything that the code refers to."""

    def __init__(self, module: str, name: str) -> None:
        self._module_and_name = module, name

    def __reduce__(self) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
        return _find, self._module_and_name


def _find(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _by_name(task: Any) -> Any:
    """A task or flow as a reference, if its module has it under its name."""
    module = task.fn.__module__
    name = task.fn.__name__
    is_there = module != "__main__" and getattr(sys.modules.get(module), name, None) is task
    return _Named(module, name) if is_there else task


def scheduler_address() -> str:
    """Address of the Dask scheduler. Raises ValueError if neither configuration nor environment names one."""
    context = FlowRunContext.get()
    parameters = (context.parameters if context else None) or {}
    run = parameters.get("run")
    config = parameters.get("config")
    if isinstance(run, RunRef):
        config = OpenRun(run).config
    if isinstance(config, RunConfig):
        address = scheduler_of(config)
    else:
        address = environment_variables.scheduler_address()
    if not address:
        raise ValueError("no Dask scheduler: set cluster.scheduler or SF_SCHEDULER, or start with `sf train`")
    return address


def dask_client() -> PrefectDaskClient:
    """The Dask client of the current flow."""
    context = FlowRunContext.get()
    assert context is not None and isinstance(context.task_runner, TaggedTaskRunner)
    return context.task_runner.client


class OwnWorkers:
    """The workers of a run that shares a scheduler with other runs, as far as they were ever connected."""

    def __init__(self) -> None:
        self._tags: dict[str, frozenset[str]] = {}
        self._turn = itertools.count()

    def choose(self, tag: str, connected: Iterable[Worker]) -> str:
        """Name of a worker with this tag, in turn; one that is away will be back. Raises ValueError if none
        was ever connected."""
        self._tags |= {worker.name: worker.tags for worker in connected}
        able = sorted(name for name, tags in self._tags.items() if tag in tags)
        if not able:
            raise ValueError(f"none of the workers that SF_WORKERS names has the tag {tag!r}")
        return able[next(self._turn) % len(able)]


_own_workers = OwnWorkers()


def submit(task: Task[..., Any], *args: Any, worker: str | None = None, **options: Any) -> TaskFuture:
    """Submit a task to the workers that carry the tag of its kind, or to the named one of them. Its first
    argument is the run. Raises KeyError for a task that sf_core.scheduling.plan does not know, because Dask
    would run it anywhere."""
    kind = TASK_KINDS[task.name]
    if worker is None and own_workers() is not None:
        worker = _own_workers.choose(kind.tag, list_connected(dask_client()).values())
    resources = dict.fromkeys([kind.tag, *([] if worker is None else [f"@{worker}"])], 1)
    run: RunRef = args[0]
    owner = run.within or owner_of(run.run_id, run.attempt)
    with dask.annotate(resources=resources, priority=kind.priority, owner=owner):
        return cast(TaskFuture, task.submit(*args, **options))


def result_of(future: PrefectFuture[R], awaited: str, timeout_s: float) -> R:
    """Result of a task. Raises the task's error, or TimeoutError that says what was waited for."""
    with waiting_for(awaited, timeout_s) as wait:
        is_waiting.set()
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            wait.check()
            # not this wait: the task itself raised the TimeoutError
            raise
        finally:
            is_waiting.clear()


def outcome_of(future: TaskFuture) -> Any:
    """What a finished task returned, or its error. None if that cannot be read: Dask keeps it on the task's
    worker, which may be lost."""
    try:
        return future.result(timeout=STATE_S, raise_on_failure=False)
    except TimeoutError:
        return None
    except Exception as error:  # of Dask; that of the task itself is in the state that it returned
        return error


def end_of(future: TaskFuture) -> LeaseEnd | None:
    """How a lease task ended; None while it is queued or runs."""
    if not future.wrapped_future.done():
        return None
    outcome = outcome_of(future) if future.wrapped_future.status in ("finished", "error") else None
    if isinstance(outcome, BaseException):
        return LeaseEnd("lost" if isinstance(outcome, LOSSES) else "failed", outcome)
    return LeaseEnd("unknown" if outcome is None else "revoked" if outcome == "revoked" else "returned")


class SchedulerLostError(BaseException):
    """The Dask scheduler died. No Exception, so that Prefect marks the run as crashed and it is restarted."""


@contextmanager
def crash_without_scheduler() -> Iterator[None]:
    """Raises SchedulerLostError if tasks were cancelled because the Dask scheduler died."""
    try:
        yield
    except FutureCancelledError as error:
        if not error.reason.startswith("scheduler-"):
            raise
        raise SchedulerLostError(
            "the Dask scheduler ended, and all tasks with it; start the run again to continue from its "
            "last committed stage"
        ) from None


class _SettingsAsTheyAre(SettingsContext):
    """Settings that are sent with a task as one object. As fields, which is Prefect's way, they take 25 ms of
    CPU to serialise for each task, and 35 to 50 ms to validate again before it begins."""

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        return {"profile": self.profile, "settings": self.settings}


@contextmanager
def use_lean_settings() -> Iterator[None]:
    """Settings for subflows: no heartbeats of their own, because ending each takes up to a second and those
    of the parent suffice, and settings that are sent as one object."""
    context = get_settings_context()
    lean = context.settings.copy_with_update(updates={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with _SettingsAsTheyAre(profile=context.profile, settings=lean):
        yield
