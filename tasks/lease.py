"""Leases: a worker's time under `rollout` or `agent`, held by a task that serves until told to yield."""

from __future__ import annotations

import itertools
from collections import deque
from types import TracebackType
from typing import Any, cast

from prefect import task
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.run import Run, RunRef
from sf_core.scheduling.lease import LeaseSpec, run_agents, serve_lease
from sf_core.scheduling.plan import Plan
from tasks.cluster import lane, result_of


@task(task_run_name="lease-{spec.lease_id}")
def lease(spec: LeaseSpec) -> str:
    """Hold a `rollout` worker as an engine until the lease is revoked."""
    return serve_lease(spec)


@task(task_run_name="agents-{spec.lease_id}")
def agents(spec: LeaseSpec) -> int:
    """Hold an `agent` worker and run sessions on it until released."""
    return run_agents(spec)


REVOKED_S, RELEASED_S = 120.0, 30.0
"""How long the end of a lease is awaited. A revoked one has yielded before; its task only has to end."""


class Leases:
    """All leases of one flow attempt. Rollout-only and agent workers are held throughout; a trainer that is
    lent has one lease running and the next one queued behind it, so that no submission stands between the end
    of training and the next token (design 5.1)."""

    def __init__(self, run: RunRef, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._held: list[tuple[str, PrefectDaskFuture[Any]]] = []
        self._lent: deque[tuple[str, PrefectDaskFuture[Any]]] = deque()
        self._revoked = False
        self._count = itertools.count()

    def __enter__(self) -> Leases:
        for worker in self._plan.agent:
            with lane("agent", worker):
                self._held.append((worker, agents.submit(self._spec(worker))))
        for worker in self._plan.rollout:
            with lane("rollout", worker):
                self._held.append((worker, lease.submit(self._spec(worker))))
        return self

    def lend_trainer(self, iteration: int) -> str | None:
        """Have the trainer lent until this iteration trains, and the next lease queued behind.

        Returns the id of the lease to revoke before training; None if the trainer is not lent."""
        if not self._plan.lent:
            return None
        if self._revoked:
            lease_id, revoked = self._lent.popleft()
            result_of(revoked, f"lease {lease_id}, which was revoked, to end", REVOKED_S)
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
        for lease_id, future in [*self._held, *self._lent]:
            if error is None:
                result_of(future, f"lease {lease_id}, which was released, to end", RELEASED_S)
            else:
                future.wait(timeout=RELEASED_S)

    def _lend(self, after: int | None) -> tuple[str, PrefectDaskFuture[Any]]:
        worker = self._plan.trainer
        spec = LeaseSpec(self._run, worker, f"{worker}-{next(self._count)}.{self._run.attempt}", after)
        with lane("rollout", worker):
            return spec.lease_id, cast(PrefectDaskFuture[Any], lease.submit(spec))

    def _spec(self, worker: str) -> LeaseSpec:
        return LeaseSpec(self._run, worker, f"{worker}.{self._run.attempt}")
