"""Leases: a worker's time under `rollout` or `agent`, held by a task that serves until told to yield."""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress
from types import TracebackType
from typing import Any

from distributed.scheduler import NoValidWorkerError
from prefect import task
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.run import Run, RunRef
from sf_core.scheduling.lease import LeaseSpec, run_agents, serve_lease
from sf_core.scheduling.plan import Plan
from tasks.cluster import submit

Future = PrefectDaskFuture[Any]

log = logging.getLogger(__name__)

RELEASED_S = 30.0
"""How long the end of a lease is awaited after its release."""


@task(name="lease", task_run_name="lease-{spec.lease_id}")
def lease(spec: LeaseSpec) -> str:
    """Hold a `rollout` worker as an engine until the lease is revoked."""
    return serve_lease(spec)


@task(name="agents", task_run_name="agents-{spec.lease_id}")
def agents(spec: LeaseSpec) -> int:
    """Hold an `agent` worker and run sessions on it until released."""
    return run_agents(spec)


class Leases:
    """All leases of one flow attempt. Rollout-only and agent workers are held throughout; each trainer that
    is lent has one lease running and the next one queued behind it, so that no submission stands between the
    end of training and the next token (design 5.1)."""

    def __init__(self, run: RunRef, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._held: list[tuple[LeaseSpec, Future]] = []
        self._lent: list[tuple[LeaseSpec, Future]] = []
        self._count = itertools.count()

    def __enter__(self) -> Leases:
        for worker in self._plan.agent:
            spec = self._spec(worker)
            self._held.append((spec, submit(agents, spec, worker=worker)))
        for worker in self._plan.rollout:
            spec = self._spec(worker)
            self._held.append((spec, submit(lease, spec, worker=worker)))
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
        if error is not None and not isinstance(error, Exception):
            # tasks/interruption.py sees to it, in less time
            return
        Run(self._run).dataplane.release(self._run.attempt)
        for spec, future in [*self._held, *self._lent]:
            future.wait(timeout=RELEASED_S)
            if not future.wrapped_future.done():
                log.warning("lease %s was released and did not end within %g s", spec.lease_id, RELEASED_S)
                # its worker is gone; should it come back, it finds nothing to do
                future.wrapped_future.cancel()
            elif error is None:
                _has_ended(future)

    def _lend(self, worker: str, after: int | None) -> None:
        lease_id = f"{worker}-{next(self._count)}.{self._run.attempt}"
        spec = LeaseSpec(self._run, worker, lease_id, after, self._plan.trainers)
        self._lent.append((spec, submit(lease, spec, worker=worker)))

    def _spec(self, worker: str) -> LeaseSpec:
        return LeaseSpec(self._run, worker, f"{worker}.{self._run.attempt}")


def _has_ended(future: Future) -> bool:
    """Raises what ended it, unless that is the lack of its worker, which others may do without."""
    if not future.wrapped_future.done():
        return False
    with suppress(NoValidWorkerError):
        future.result()
    return True
