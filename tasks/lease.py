"""Leases: a worker's time under `rollout` or `agent`, held by a task that serves until told to yield."""

from __future__ import annotations

import itertools
import logging
import threading
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any

from distributed.scheduler import NoValidWorkerError
from prefect import Task, task
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.run import Run, RunRef
from sf_core.scheduling.lease import LeaseSpec, run_agents, serve_lease
from sf_core.scheduling.plan import Plan, Worker, connected_workers, held_as
from tasks.cluster import submit

Future = PrefectDaskFuture[Any]

log = logging.getLogger(__name__)

RELEASED_S = 30.0
"""How long the end of a lease is awaited after its release."""

LOOK_S = 1.0
"""How often workers that have joined are looked for."""


@task(name="lease", task_run_name="lease-{spec.lease_id}")
def lease(spec: LeaseSpec) -> str:
    """Hold a `rollout` worker as an engine until the lease is revoked."""
    return serve_lease(spec)


@task(name="agents", task_run_name="agents-{spec.lease_id}")
def agents(spec: LeaseSpec) -> int:
    """Hold an `agent` worker and run sessions on it until released."""
    return run_agents(spec)


KINDS: dict[str, Task[..., Any]] = {task.name: task for task in (lease, agents)}


class Leases:
    """All leases of one flow attempt. Rollout-only and agent workers are held throughout, those that join
    later from then on; each trainer that is lent has one lease running and the next one queued behind it, so
    that no submission stands between the end of training and the next token (design 5.1)."""

    def __init__(self, run: RunRef, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._held: dict[tuple[str, str], tuple[LeaseSpec, Future]] = {}
        """By kind and worker."""
        self._lent: list[tuple[LeaseSpec, Future]] = []
        self._count = itertools.count()
        self._submitting = threading.Lock()
        """Prefect numbers the runs of a task, and expects one thread to submit them."""
        self._is_over = threading.Event()

    def __enter__(self) -> Leases:
        for worker in self._plan.agent:
            self._hold("agents", worker)
        for worker in self._plan.rollout:
            self._hold("lease", worker)
        # Prefect finds the flow that a task belongs to by the context
        watch = partial(copy_context().run, self._watch)
        self._watcher = threading.Thread(target=watch, name="joining workers", daemon=True)
        self._watcher.start()
        return self

    def lend_trainers(self, iteration: int) -> list[tuple[str, str]]:
        """Have every trainer lent until this iteration trains, and its next lease queued behind.

        Returns worker and id of the leases to revoke before training; none if trainers are not lent."""
        if self._plan.lent:
            self._lent = [(spec, future) for spec, future in self._lent if not _has_ended(future)]
            for worker in self._plan.trainers:
                queued = [spec.after for spec, _ in self._lent if spec.worker == worker]
                if not queued:
                    # at the start of the run, or again after the gate has turned a loan down
                    self._lend(worker, after=iteration - 1 if iteration else None)
                if iteration not in queued:
                    self._lend(worker, after=iteration)
        return [(spec.worker, spec.lease_id) for spec, _ in self._lent if spec.after != iteration]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._watcher.join(RELEASED_S)
        Run(self._run).dataplane.release(self._run.attempt)
        connected = self._connected()
        for spec, future in [*self._held.values(), *self._lent]:
            if spec.worker in connected:
                future.wait(timeout=RELEASED_S)
            if not future.wrapped_future.done():
                log.warning("lease %s was released and did not end", spec.lease_id)
                # its worker is gone or hangs; should it come back, it finds nothing to do
                future.wrapped_future.cancel()
            elif error is None:
                _has_ended(future)

    def _watch(self) -> None:
        """Have workers that join hold a lease at once, and those that come back after theirs was given up."""
        while not self._is_over.wait(LOOK_S):
            for worker in self._connected().values():
                for kind in held_as(worker, self._plan.trainers):
                    if (kind, worker.name) not in self._held or self._was_given_up(kind, worker.name):
                        log.info("worker %s has joined the run", worker.name)
                        self._hold(kind, worker.name)

    def _connected(self) -> dict[str, Worker]:
        """By name; none if the scheduler does not answer, which whoever waits for a stage is told."""
        _, future = next(iter(self._held.values()))
        with suppress(OSError):
            return {
                worker.name: worker for worker in connected_workers(future.wrapped_future.client).values()
            }
        return {}

    def _was_given_up(self, kind: str, worker: str) -> bool:
        """Dask waited in vain for the worker to come back."""
        future = self._held[kind, worker][1].wrapped_future
        return future.status == "error" and isinstance(future.exception(), NoValidWorkerError)

    def _hold(self, kind: str, worker: str) -> None:
        spec = LeaseSpec(self._run, worker, f"{worker}.{self._run.attempt}")
        with self._submitting:
            self._held[kind, worker] = spec, submit(KINDS[kind], spec, worker=worker)

    def _lend(self, worker: str, after: int | None) -> None:
        lease_id = f"{worker}-{next(self._count)}.{self._run.attempt}"
        spec = LeaseSpec(self._run, worker, lease_id, after, self._plan.trainers)
        with self._submitting:
            self._lent.append((spec, submit(lease, spec, worker=worker)))


def _has_ended(future: Future) -> bool:
    """Raises what ended it, unless that is the lack of its worker, which others may do without."""
    if not future.wrapped_future.done():
        return False
    with suppress(NoValidWorkerError):
        future.result()
    return True
