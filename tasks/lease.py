"""Leases as tasks: what they run, and the thread that submits them as `LeaseSet` decides."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

from prefect import Task, task

from sf_core.dataplane.control.client import UNANSWERED
from sf_core.reports.log_lines import log_warning
from sf_core.scheduling.cluster import Losses, list_connected
from sf_core.scheduling.leases import Action, Lease, LeaseSet, Revoke
from sf_core.scheduling.plan import Duty, Plan
from sf_core.scheduling.worker_state import current_epoch, current_worker
from sf_core.stages.lease import run_sessions, serve_lease
from sf_core.stages.run import OpenRun, RunRef
from tasks.cluster import TaskFuture, dask_client, end_of, submit

log = logging.getLogger(__name__)

RELEASED_S = 30.0
"""Longest wait for the end of all leases after their release; then tasks/interruption.py ends them."""

LOOK_S = 1.0
"""Interval of checks for workers that have joined and leases that have ended."""


@task(name="lease", task_run_name="{spec.purpose}")
def lease(run: RunRef, spec: Lease) -> str:
    """Hold a `rollout` worker as an engine until the lease is revoked."""
    return serve_lease(current_worker(), run, spec, current_epoch())


@task(name="agents", task_run_name="{spec.purpose}")
def agents(run: RunRef, spec: Lease) -> int:
    """Hold an `agent` worker and run sessions on it until released."""
    return run_sessions(run, spec, "agent")


@task(name="rewards", task_run_name="{spec.purpose}")
def rewards(run: RunRef, spec: Lease) -> int:
    """Hold a `reward` worker and score the answers of agents until released."""
    return run_sessions(run, spec, "reward")


HELD_BY: dict[Duty, Task[..., Any]] = {"agent": agents, "rollout": lease, "reward": rewards}


class Leases:
    """All leases of one flow attempt: their futures, and the thread that watches workers and leases."""

    def __init__(self, run: RunRef, plan: Plan) -> None:
        self._ref = run
        self._run = OpenRun(run)
        self._leases = LeaseSet(plan, self._run.config, run.attempt)
        self._losses = Losses()
        self._futures: dict[str, TaskFuture] = {}
        """Futures of unsettled leases by lease id."""
        self._changing = threading.Lock()
        """Guards leases, which flow and watcher change. Prefect numbers runs and expects one submitter."""
        self._is_over = threading.Event()

    def __enter__(self) -> Leases:
        self._follow(self._leases.begin)
        # Prefect finds the flow that a task belongs to by the context
        watch = partial(copy_context().run, self._watch)
        self._watcher = threading.Thread(target=watch, name="leases", daemon=True)
        self._watcher.start()
        return self

    def replan(self) -> Plan:
        """Make the plan anew; leases follow it. Raises FutureCancelledError if their scheduler took them."""
        for gone in [f for f in list(self._futures.values()) if f.wrapped_future.cancelled()]:
            gone.wrapped_future.result()
        self._follow(self._leases.replan)
        return self._leases.plan

    def lend_trainers(self, iteration: int) -> list[tuple[str, str]]:
        """If trainers are lent, lend each one until this iteration trains. Returns (worker, lease id) of the
        leases to revoke before training; raises the error of a loan that failed."""
        self._follow(partial(self._leases.lend, iteration))
        return self._leases.to_revoke(iteration)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._is_over.set()
        self._leases.end()
        if error is not None and not isinstance(error, Exception):
            # tasks/interruption.py frees the workers, in less time
            return self._watcher.join(LOOK_S)
        self._watcher.join(RELEASED_S)
        begun = self._release()
        self._follow()
        deadline = time.monotonic() + RELEASED_S
        for lease_id in self._leases.ids_to_await(begun):
            self._futures[lease_id].wait(timeout=max(0.0, deadline - time.monotonic()))
            if not self._futures[lease_id].wrapped_future.done():
                log.warning("lease %s was released but did not end", lease_id)
        for future in self._futures.values():
            if not future.wrapped_future.done():
                # queued, or its worker is gone or hangs; if the lease begins, it finds nothing to do
                future.wrapped_future.cancel()
        self._follow()
        self._leases.check_end(flow_failed=error is not None)

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S) and self._leases.nobody_left is None:
            self._follow(self._leases.adapt)
            if self._leases.nobody_left is not None:
                self._release()

    def _follow(self, decide: Callable[[], list[Action]] = list) -> None:
        """Observe leases and workers (none if the scheduler does not answer), then do as is decided."""
        with self._changing:
            ended = {lease_id: end_of(future) for lease_id, future in self._futures.items()}
            connected = list_connected(dask_client())
            self._leases.observe(time.monotonic(), connected.values(), ended)
            for sentence in self._losses.describe_losses(
                connected, self._leases.plan, self._leases.list_holders()
            ):
                log_warning(sentence)
            for lease_id in self._futures.keys() - self._leases.list_unsettled():
                del self._futures[lease_id]
            for action in decide():
                self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Lease():
                held_by = HELD_BY[action.duty]
                self._futures[action.lease_id] = submit(held_by, self._ref, action, worker=action.worker)
            case Revoke(lease_id):
                self._run.dataplane.revoke(lease_id, self._run.config.cluster.yield_timeout_s)

    def _release(self) -> set[str]:
        """Release all leases of the run; returns the holders that the data plane knows."""
        try:
            status = self._run.dataplane.status()
            self._run.dataplane.release(self._ref.attempt)
        except UNANSWERED as error:
            log.warning("the leases cannot be released now and will end later: %s", error)
            return set()
        return {*(engine["id"] for engine in status["engines"]), *status["runners"]}
