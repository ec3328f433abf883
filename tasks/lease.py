"""Leases: a worker's time under `rollout` or `agent`, held by a task that serves until told to yield."""

from __future__ import annotations

import itertools
from collections import deque
from types import TracebackType
from typing import Any

from prefect import task
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.run import Run, RunRef
from sf_core.scheduling.lease import LeaseSpec, run_agents, serve_lease
from sf_core.scheduling.plan import Plan
from tasks.cluster import submit


@task(name="lease", task_run_name="lease-{spec.lease_id}")
def lease(spec: LeaseSpec) -> str:
    """Hold a `rollout` worker as an engine until the lease is revoked."""
    return serve_lease(spec)


@task(name="agents", task_run_name="agents-{spec.lease_id}")
def agents(spec: LeaseSpec) -> int:
    """Hold an `agent` worker and run sessions on it until released."""
    return run_agents(spec)


class Leases:
    """All leases of one flow attempt. Rollout-only and agent workers are held throughout; a trainer that is
    lent has one lease running and the next one queued behind it, so that no submission stands between the end
    of training and the next token (design 5.1)."""

    def __init__(self, run: RunRef, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._held: list[PrefectDaskFuture[Any]] = []
        self._lent: deque[tuple[str, PrefectDaskFuture[Any]]] = deque()
        self._revoked = False
        self._count = itertools.count()

    def __enter__(self) -> Leases:
        for worker in self._plan.agent:
            self._held.append(submit(agents, self._spec(worker), worker=worker))
        for worker in self._plan.rollout:
            self._held.append(submit(lease, self._spec(worker), worker=worker))
        return self

    def lend_trainer(self, iteration: int) -> str | None:
        """Have the trainer lent until this iteration trains, and the next lease queued behind.

        Returns the id of the lease to revoke before training; None if the trainer is not lent."""
        if not self._plan.lent:
            return None
        if self._revoked:
            self._lent.popleft()[1].result()
        if self._lent and self._lent[0][1].wrapped_future.done():
            self._lent.popleft()
        while len(self._lent) < 2:
            self._lent.append(self._lend(after=iteration if self._lent else None))
        self._revoked = Run(self._run).directory.read_manifest(iteration, "train") is None
        return self._lent[0][0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Run(self._run).dataplane.release()
        for future in [*self._held, *(future for _, future in self._lent)]:
            future.wait(timeout=30.0)
            if error is None:
                future.result()

    def _lend(self, after: int | None) -> tuple[str, PrefectDaskFuture[Any]]:
        worker = self._plan.trainers[0]
        spec = LeaseSpec(self._run, worker, f"{worker}-{next(self._count)}.{self._run.attempt}", after)
        return spec.lease_id, submit(lease, spec, worker=worker)

    def _spec(self, worker: str) -> LeaseSpec:
        return LeaseSpec(self._run, worker, f"{worker}.{self._run.attempt}")
