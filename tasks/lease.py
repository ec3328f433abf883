"""Leases: a worker's time under `rollout`, `agent` or `reward`, held by a task until told to yield."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Container
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import httpx
from distributed.scheduler import KilledWorker, NoValidWorkerError
from prefect import Task, task
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.dataplane.control.client import DataplaneError
from sf_core.scheduling.cluster import connected_workers
from sf_core.scheduling.elastic import Elastic
from sf_core.scheduling.plan import Duty, Plan, Worker, duty_of, make_plan
from sf_core.stages.lease import LeaseSpec, run_sessions, serve_lease
from sf_core.stages.run import OpenRun, RunRef
from tasks.cluster import dask_client, is_known, submit

Future = PrefectDaskFuture[Any]

log = logging.getLogger(__name__)

UNANSWERED = (httpx.HTTPError, DataplaneError)
"""Errors of a data plane that is away or does not know the run."""

RELEASED_S = 30.0
"""Longest wait for the end of a lease after its release."""

LOOK_S = 1.0
"""Interval of checks for workers that have joined."""

LOSSES = (NoValidWorkerError, KilledWorker, ConnectionError, httpx.TransportError)
"""Errors of a lease through no fault of its own: its worker was away for long or died repeatedly, or the data
plane did not answer."""

AGAIN_S = 30.0
"""A worker whose lease was lost gets another one at the earliest this long after it got the lost one."""


@task(name="lease", task_run_name="lease-{spec.lease_id}")
def lease(spec: LeaseSpec) -> str:
    """Hold a `rollout` worker as an engine until the lease is revoked."""
    return serve_lease(spec)


@task(name="agents", task_run_name="agents-{spec.lease_id}")
def agents(spec: LeaseSpec) -> int:
    """Hold an `agent` worker and run sessions on it until released."""
    return run_sessions(spec, "agent")


@task(name="rewards", task_run_name="rewards-{spec.lease_id}")
def rewards(spec: LeaseSpec) -> int:
    """Hold a `reward` worker and score the answers of agents until released."""
    return run_sessions(spec, "reward")


HELD_BY: dict[Duty, Task[..., Any]] = {"agent": agents, "rollout": lease, "reward": rewards}


class Leases:
    """All leases of one flow attempt, and the plan that they follow. Rollout-only, agent and reward workers
    are held from when they join to the end, unless `cluster.elastic` makes their number follow the queue.
    Each trainer that is lent has one lease running and the next one queued behind it, so that no submission
    stands between the end of training and the next token."""

    def __init__(self, run: RunRef, plan: Plan) -> None:
        self._run, self._plan = run, plan
        config = self._config = OpenRun(run).config
        self._elastic: dict[Duty, Elastic] = {
            duty: Elastic(bounds, config.rollout.concurrency)
            for duty, bounds in config.cluster.elastic.items()
        }
        self._held: dict[tuple[Duty, str], tuple[LeaseSpec, Future]] = {}
        """The last lease of each duty and worker."""
        self._lent: list[tuple[LeaseSpec, Future]] = []
        self._since: dict[str, float] = {}
        """Monotonic time at which a worker got its last lease."""
        self._count = itertools.count()
        self._seen: dict[str, tuple[Worker, float]] = {}
        """Every worker that was ever connected, and the monotonic time at which it last was."""
        self._changing = threading.RLock()
        """Guards leases, which flow and watcher change. Prefect numbers runs and expects one submitter."""
        self._is_over = threading.Event()
        self._failed: dict[str, BaseException] = {}
        """Errors by lease id; a lease that failed would fail again."""
        self._nobody_left: BaseException | None = None
        """The error because of which the run cannot go on."""

    def __enter__(self) -> Leases:
        for duty, workers in self._plan.held.items():
            elastic = self._elastic.get(duty)
            for worker in workers[: elastic.at_least if elastic else None]:
                self._hold(duty, worker)
        # Prefect finds the flow that a task belongs to by the context
        watch = partial(copy_context().run, self._watch)
        self._watcher = threading.Thread(target=watch, name="leases", daemon=True)
        self._watcher.start()
        return self

    def replan(self) -> Plan:
        """Make the plan anew, as at the start of the run, from the current workers; leases follow it. If they
        allow no plan the last one stays in force, and the wait for its trainers reports that. Raises
        FutureCancelledError if the leases are gone with their scheduler."""
        with self._changing:
            for _, future in [*self._held.values(), *self._lent]:
                if future.wrapped_future.cancelled():
                    future.wrapped_future.result()
            connected = self._connected()
            now, patience_s = time.monotonic(), self._config.train.gang_timeout_s
            # a worker that is away may be restarting
            there = [worker for worker, seen in self._seen.values() if now - seen <= patience_s]
            try:
                plan = make_plan(there, self._config, trained=self._plan.trainers)
            except ValueError as error:
                log.info("the plan stays as it was: %s", error)
                plan = self._plan
            if plan.trainers != self._plan.trainers:
                log.warning("who trains changes: %s", ", ".join(plan.trainers))
            self._plan = plan
            self._follow(connected)
        return plan

    def _follow(self, connected: Container[str]) -> None:
        """End leases of an earlier plan: that of a new trainer when training begins, like a loan, that of a
        former trainer now."""
        for (duty, worker), (spec, future) in list(self._held.items()):
            # its device may have been taken to replace a lost trainer
            was_taken = worker in connected and _was_revoked(future)
            if duty == "rollout" and (worker in self._plan.trainers or was_taken):
                del self._held[duty, worker]
                self._lent.append((spec, future))
        for spec, _ in self._lent:
            if spec.worker not in self._plan.trainers:
                OpenRun(self._run).dataplane.revoke(spec.lease_id, self._config.cluster.yield_timeout_s)

    def lend_trainers(self, iteration: int) -> list[tuple[str, str]]:
        """If trainers are lent, lend each one until this iteration trains, and queue its next lease behind.

        Returns (worker, lease id) of the leases to revoke before training."""
        with self._changing:
            connected = self._connected()
            self._lent = [
                (spec, future)
                for spec, future in self._lent
                if not _has_ended(spec, future, is_there=spec.worker in connected)
            ]
            for worker in self._plan.trainers if self._plan.lent else ():
                queued = [spec.after for spec, _ in self._lent if spec.worker == worker]
                if not queued:
                    # at the start of the run, or again after the gate has refused a loan
                    self._lend(worker, after=iteration - 1 if iteration else None)
                # after the last iteration there is only an evaluation
                if iteration not in queued and iteration < self._config.train.iterations:
                    self._lend(worker, after=iteration)
            return [(spec.worker, spec.lease_id) for spec, _ in self._lent if spec.after != iteration]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        interrupted = error is not None and not isinstance(error, Exception)
        self._watcher.join(LOOK_S if interrupted else RELEASED_S)
        if interrupted:
            # tasks/interruption.py frees the workers, in less time
            return
        begun = self._release()
        connected = self._connected()
        leases = [*self._held.values(), *self._lent]
        # leases that the data plane has never seen go last: while others end, they may find nothing to do
        for spec, future in sorted(leases, key=lambda lease: lease[0].holder not in begun):
            if spec.worker in connected and spec.holder in begun:
                future.wait(timeout=RELEASED_S)
                if not future.wrapped_future.done():
                    log.warning("lease %s was released and did not end", spec.lease_id)
            if not future.wrapped_future.done():
                # queued, or its worker is gone or hangs; if the lease begins, it finds nothing to do
                future.wrapped_future.cancel()
            elif error is None:
                _has_ended(spec, future, is_there=spec.worker in connected)
        if self._nobody_left is not None:
            # the stage that waited knows only that no worker works on the run any more
            raise self._nobody_left

    def _release(self) -> set[str]:
        """Release all leases of the run; returns the holders that the data plane knows."""
        dataplane = OpenRun(self._run).dataplane
        try:
            status = dataplane.status()
            dataplane.release(self._run.attempt)
        except UNANSWERED as error:
            log.warning("the leases end by themselves, later, because they cannot be released: %s", error)
            return set()
        return {*(engine["id"] for engine in status["engines"]), *status["runners"]}

    def _watch(self) -> None:
        """Give workers that join a lease at once, and those whose lease was lost another one. Ends the run if
        no worker is left for a duty that it needs."""
        while not self._is_over.wait(LOOK_S):
            with self._changing:
                connected = self._connected()
                for spec, loss in self._lost_loans(connected):
                    log.warning("%s, and %s gets another one", _sentence(spec, loss), spec.worker)
                    self._lent = [loan for loan in self._lent if loan[0] != spec]
                    self._lend(spec.worker, spec.after)
                workers: dict[Duty, list[str]] = {}
                for name, worker in sorted(connected.items()):
                    if (duty := duty_of(worker, self._plan.trainers)) is not None:
                        workers.setdefault(duty, []).append(name)
                for duty, names in workers.items():
                    # a data plane that restarts is asked again in the next round
                    with suppress(*UNANSWERED):
                        self._adapt(duty, names)
                self._note_failures()
                if self._nobody_left is not None:
                    self._release()
                    return

    def _note_failures(self) -> None:
        """Log failures of leases at once, which are otherwise raised at the end. If a duty has failed on all
        its workers, no worker is left for it, and the run ends rather than wait for workers to join."""
        leases: dict[Duty, list[tuple[LeaseSpec, Future]]] = {"rollout": list(self._lent)}
        for (duty, _), lease in self._held.items():
            leases.setdefault(duty, []).append(lease)
        for duty, of_duty in leases.items():
            failed = [failure for lease in of_duty if (failure := self._failure_of(*lease)) is not None]
            if failed and all(future.wrapped_future.done() for _, future in of_duty):
                log.error("nobody is left for `%s`, and the run ends", duty)
                self._nobody_left = failed[0]

    def _failure_of(self, spec: LeaseSpec, future: Future) -> BaseException | None:
        if spec.lease_id not in self._failed:
            outcome = _outcome(future)
            if isinstance(outcome, BaseException) and not isinstance(outcome, LOSSES):
                log.error("lease %s failed: %s: %s", spec.lease_id, type(outcome).__name__, outcome)
                self._failed[spec.lease_id] = outcome
        return self._failed.get(spec.lease_id)

    def _lost_loans(self, connected: Container[str]) -> list[tuple[LeaseSpec, BaseException]]:
        """Lost leases of connected trainers that could roll out again before they train. Training revokes
        whichever lease then holds the worker."""
        return [
            (spec, loss)
            for spec, future in self._lent
            if self._plan.lent and spec.worker in self._plan.trainers and spec.worker in connected
            if self._may_have_another(spec.worker) and (loss := _loss(future)) is not None
        ]

    def _adapt(self, duty: Duty, workers: list[str]) -> None:
        """Have all of these workers hold a lease, or as many as the queue needs."""
        free = [worker for worker in workers if self._is_free(duty, worker)]
        num_lacking = len(free)
        if (elastic := self._elastic.get(duty)) is not None:
            dataplane = OpenRun(self._run).dataplane
            status = dataplane.status()
            wanted = elastic.wanted(time.monotonic(), status["work"][duty])
            runners = status["runners"]
            leases = [self._held[duty, worker] for worker in workers if worker not in free]
            holders = [spec.holder for spec, future in leases if not future.wrapped_future.done()]
            staying = [name for name in holders if name not in runners or not runners[name]["retiring"]]
            num_lacking = max(0, wanted - len(staying))
            # a runner that the data plane does not know yet is retired later, if there are still too many
            staying.sort(key=lambda name: name not in runners)
            for holder in staying[wanted:]:
                if holder in runners:
                    dataplane.retire(holder)
        for worker in free[:num_lacking]:
            if (held := self._held.get((duty, worker))) is not None and (loss := _loss(held[1])):
                log.warning("%s, and %s gets another one", _sentence(held[0], loss), worker)
            else:
                log.info("worker %s joins the run", worker)
            self._hold(duty, worker)

    def _connected(self) -> dict[str, Worker]:
        """Connected workers by name; empty if the scheduler does not answer, which stage waits report."""
        found = {worker.name: worker for worker in connected_workers(dask_client()).values()}
        now = time.monotonic()
        self._seen |= {name: (worker, now) for name, worker in found.items()}
        return found

    def _is_free(self, duty: Duty, worker: str) -> bool:
        """Whether the worker was never held, its lease was lost, or it was retired."""
        if (duty, worker) not in self._held:
            return True
        outcome = _outcome(self._held[duty, worker][1])
        if isinstance(outcome, LOSSES):
            return self._may_have_another(worker)
        # a lease that failed would fail again; its error is raised at the end
        has_returned = outcome is not None and not isinstance(outcome, BaseException)
        return duty in self._elastic and has_returned

    def _may_have_another(self, worker: str) -> bool:
        return time.monotonic() - self._since[worker] > AGAIN_S

    def _hold(self, duty: Duty, worker: str) -> None:
        spec = self._spec(worker)
        self._held[duty, worker] = spec, submit(HELD_BY[duty], spec, worker=worker)
        self._since[worker] = time.monotonic()

    def _lend(self, worker: str, after: int | None) -> None:
        spec = replace(self._spec(worker), after=after, trainers=self._plan.trainers)
        self._lent.append((spec, submit(lease, spec, worker=worker)))
        self._since[worker] = time.monotonic()

    def _spec(self, worker: str) -> LeaseSpec:
        return LeaseSpec(self._run, worker, f"{worker}-{next(self._count)}.{self._run.attempt}")


def _outcome(future: Future) -> Any:
    """The result or the error of a lease that is over; None while it is not known."""
    if future.wrapped_future.status not in ("finished", "error"):
        return None
    try:
        return future.result(raise_on_failure=False) if is_known(future) else None
    except Exception as error:
        # an error of Dask; that of the task itself is in the state that it returned
        return error


def _was_revoked(future: Future) -> bool:
    """Whether the lease was revoked to take its device; a drained engine's worker gets no new lease."""
    return bool(_outcome(future) == "revoked")


def _has_ended(spec: LeaseSpec, future: Future, *, is_there: bool) -> bool:
    """Whether the lease is over. Raises its error unless it was lost or its worker is not connected."""
    if not future.wrapped_future.done():
        return False
    if is_there and (loss := _loss(future)) is not None:
        log.warning(_sentence(spec, loss))
    elif is_there and is_known(future):
        future.result()
    return True


def _loss(future: Future) -> BaseException | None:
    """The error that ended a lease, if it is one of `LOSSES`."""
    outcome = _outcome(future)
    return outcome if isinstance(outcome, LOSSES) else None


def _sentence(spec: LeaseSpec, loss: BaseException) -> str:
    reason = str(loss).partition("\n")[0]
    return f"lease {spec.lease_id} was lost ({type(loss).__name__}: {reason})"
