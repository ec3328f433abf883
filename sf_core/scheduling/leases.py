"""Which leases a run should have. Facts in, submissions out: no clock, no IO.

A lease is a worker's time under `rollout`, `agent` or `reward`, held by a task until it is told to yield.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sf_core.config import RunConfig
from sf_core.scheduling.plan import Duty, Plan, Worker, duty_of, make_plan

log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""A worker whose lease was lost gets another one at the earliest this long after it got the last one."""


@dataclass(frozen=True, slots=True)
class Lease:
    duty: Duty
    worker: str
    lease_id: str
    """Id of the lease within the run, kept when Dask runs the lease again."""
    after: int | None = None
    """Iteration that must be trained before this lease may start on a trainer."""
    trainers: tuple[str, ...] = ()
    """Workers that are lent together, this one included; empty for a lease that lasts the whole run."""

    @property
    def holder(self) -> str:
        """Id of the engine or runner in the data plane."""
        return f"{self.worker}:{self.lease_id}"

    @property
    def purpose(self) -> str:
        """What is held, for which work, and of a trainer when: the name of the lease in Prefect.

        >>> Lease("agent", "a0", "a0-2.1").purpose
        'agents on a0'
        >>> Lease("rollout", "t0", "t0-3.1", after=4, trainers=("t0",)).purpose
        'rollout on t0, lent after iteration 4 has trained'
        """
        work = {"agent": "agents", "reward": "rewards", "rollout": "rollout"}[self.duty]
        work_and_worker = f"{work} on {self.worker}"
        if not self.trainers:
            return work_and_worker
        when = (
            "until iteration 0 trains" if self.after is None else f"after iteration {self.after} has trained"
        )
        return f"{work_and_worker}, lent {when}"


def lease_of(holder: str) -> tuple[str, str]:
    """The worker and the lease id of a `Lease.holder`."""
    worker, _, lease_id = holder.partition(":")
    return worker, lease_id


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """How a lease ended. One that was lost ended through no fault of its own; one that failed would fail
    again. Unknown: its worker, which knows, does not answer."""

    how: Literal["revoked", "returned", "lost", "failed", "unknown"]
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Revoke:
    """Have the engine of this lease yield its device."""

    lease_id: str


Action = Lease | Revoke
"""What is to be done. A lease is to be submitted to its worker."""


class LeaseSet:
    """The leases of one flow attempt, and the plan that they follow. Rollout-only, agent and reward workers
    have a permanent lease from when they join to the end. Each trainer that is lent has one loan running and
    the next one queued behind it, so that no submission stands between the end of training and the next
    token.

    Call `observe` before the methods that decide."""

    def __init__(self, plan: Plan, config: RunConfig, attempt: int) -> None:
        self.plan = plan
        self._config = config
        self._attempt = attempt
        self._permanent: dict[tuple[Duty, str], Lease] = {}
        """The last permanent lease of each duty and worker."""
        self._loans: list[Lease] = []
        self._ended: dict[str, LeaseEnd | None] = {}
        self._count = itertools.count()
        self._now = 0.0
        self._submitted_at: dict[str, float] = {}
        """Time at which a worker got its last lease."""
        self._connected: dict[str, Worker] = {}
        self._seen: dict[str, tuple[Worker, float]] = {}
        """Every worker that was ever connected, and the time at which it last was."""
        self._is_over = False
        self.nobody_left: BaseException | None = None
        """The error because of which the run cannot go on."""

    def observe(self, now: float, connected: Iterable[Worker], ended: Mapping[str, LeaseEnd | None]) -> None:
        """Take note of the time (monotonic), of the connected workers, and how each lease of `list_unsettled`
        has ended: None if it has not."""
        self._now = now
        self._connected = {worker.name: worker for worker in connected}
        self._seen |= {name: (worker, now) for name, worker in self._connected.items()}
        self._ended |= ended
        for lease_id, end in ended.items():
            if end is not None and end.how == "failed":
                log.error("lease %s failed: %s: %s", lease_id, type(end.error).__name__, end.error)

    def list_unsettled(self) -> set[str]:
        """Ids of the leases that are queued or run, or ended in a way that is not known."""
        return {lease.lease_id for lease in self._leases() if self._how(lease) in (None, "unknown")}

    def list_holders(self) -> set[str]:
        """Names of the workers with a lease that has not ended by itself."""
        return {lease.worker for lease in self._leases() if self._how(lease) in (None, "unknown", "lost")}

    def begin(self) -> list[Action]:
        """The permanent leases at the start."""
        return [
            self._submit(duty, worker)
            for duty, workers in self.plan.workers_by_duty.items()
            for worker in workers
        ]

    def replan(self) -> list[Action]:
        """Make the plan anew, as at the start of the run, from the current workers; leases follow it. If they
        allow no plan the last one stays in force, and the wait for its trainers reports that.

        A permanent lease of a new trainer ends when training begins, like a loan; loans of a former trainer
        are revoked now."""
        patience_s = self._config.train.gang_timeout_s
        # a worker that is away may be restarting
        connected = [worker for worker, seen in self._seen.values() if self._now - seen <= patience_s]
        try:
            plan = make_plan(connected, self._config, trained=self.plan.trainers)
        except ValueError as error:
            log.info("the assignment of workers stays as it is: %s", error)
            plan = self.plan
        if plan.trainers != self.plan.trainers:
            log.warning("the trainers change to: %s", ", ".join(plan.trainers))
        self.plan = plan
        for (duty, worker), lease in list(self._permanent.items()):
            # its device may have been taken to replace a lost trainer; a drained one gets no new lease
            was_taken = worker in self._connected and self._how(lease) == "revoked"
            if duty == "rollout" and (worker in plan.trainers or was_taken):
                self._loans.append(self._permanent.pop((duty, worker)))
        unsettled = self.list_unsettled()
        former = [loan.lease_id for loan in self._loans if loan.worker not in plan.trainers]
        return [Revoke(lease_id) for lease_id in former if lease_id in unsettled]

    def lend(self, iteration: int) -> list[Action]:
        """If trainers are lent, lend each one until this iteration trains, and queue its next loan behind.
        Raises the error of a loan that failed."""
        if self._is_over:
            return []
        self._check(self._loans)
        self._loans = [loan for loan in self._loans if self._how(loan) is None]
        actions: list[Action] = []
        for worker in self.plan.trainers if self.plan.lent else ():
            queued = [loan.after for loan in self._loans if loan.worker == worker]
            if not queued:
                # at the start of the run, or again after the gate has refused a loan
                actions.append(self._lend(worker, after=iteration - 1 if iteration else None))
            # after the last iteration there is only an evaluation
            if iteration not in queued and iteration < self._config.train.iterations:
                actions.append(self._lend(worker, after=iteration))
        return actions

    def to_revoke(self, iteration: int) -> list[tuple[str, str]]:
        """Worker and lease id of the loans to revoke before this iteration trains."""
        return [(loan.worker, loan.lease_id) for loan in self._loans if loan.after != iteration]

    def adapt(self) -> list[Action]:
        """Leases for workers that join, and again for those whose lease was lost. All is over, and
        `nobody_left` says why, if a duty has failed on all its workers: the run would wait for workers to
        join."""
        if self._is_over:
            return []
        actions: list[Action] = []
        for loan in self._list_lost_loans():
            self._log_again(loan)
            self._loans.remove(loan)
            actions.append(self._lend(loan.worker, loan.after))
        for name, worker in sorted(self._connected.items()):
            duty = duty_of(worker, self.plan.trainers)
            if duty is None:
                continue
            lease = self._permanent.get((duty, name))
            if lease is None:
                log.info("worker %s joins the run", name)
            elif self._how(lease) == "lost" and self._may_have_another(name):
                self._log_again(lease)
            else:
                continue
            actions.append(self._submit(duty, name))
        self._judge_duties()
        return actions

    def end(self) -> None:
        """Nothing is submitted from now on."""
        self._is_over = True

    def ids_to_await(self, begun: Container[str]) -> list[str]:
        """Ids of the released leases that will end: `begun` are the holders that the data plane knows. The
        others are queued, or their worker is gone."""
        unsettled = self.list_unsettled()
        return [
            lease.lease_id
            for lease in self._leases()
            if lease.holder in begun and lease.worker in self._connected and lease.lease_id in unsettled
        ]

    def check_end(self, *, flow_failed: bool) -> None:
        """Raises what ends the run after all. A flow that failed knows why, unless nobody was left: the stage
        that waited knows only that no worker works on the run any more."""
        if self.nobody_left is not None:
            raise self.nobody_left
        if not flow_failed:
            self._check(self._leases())

    def _check(self, leases: Iterable[Lease]) -> None:
        """Raises the error of one of these leases that failed, if its worker is there. What was lost is only
        logged."""
        connected = [lease for lease in leases if lease.worker in self._connected]
        for lease in connected:
            if self._how(lease) == "lost":
                log.warning(self._sentence(lease))
        for error in self._errors(connected):
            raise error

    def _list_lost_loans(self) -> list[Lease]:
        """Lost loans of connected trainers that could roll out again before they train. Training revokes
        whichever loan then holds the worker."""
        return [
            loan
            for loan in self._loans
            if self.plan.lent and loan.worker in self.plan.trainers and loan.worker in self._connected
            if self._may_have_another(loan.worker) and self._how(loan) == "lost"
        ]

    def _may_have_another(self, worker: str) -> bool:
        return self._now - self._submitted_at[worker] > AGAIN_S

    def _judge_duties(self) -> None:
        of_duty: dict[Duty, list[Lease]] = {}
        for lease in [*self._loans, *self._permanent.values()]:
            of_duty.setdefault(lease.duty, []).append(lease)
        for duty, leases in of_duty.items():
            errors = self._errors(leases)
            if errors and all(self._how(lease) is not None for lease in leases):
                log.error("no worker is left for `%s`, so the run ends", duty)
                self.nobody_left = errors[0]
                self.end()

    def _errors(self, leases: Iterable[Lease]) -> list[BaseException]:
        """Errors of leases that failed."""
        ends = [self._ended.get(lease.lease_id) for lease in leases]
        return [end.error for end in ends if end is not None and end.how == "failed" and end.error]

    def _leases(self) -> list[Lease]:
        return [*self._permanent.values(), *self._loans]

    def _how(self, lease: Lease) -> str | None:
        """How the lease ended; None while it is queued or runs."""
        end = self._ended.get(lease.lease_id)
        return None if end is None else end.how

    def _submit(self, duty: Duty, worker: str) -> Lease:
        lease = self._permanent[duty, worker] = Lease(duty, worker, self._new_id(worker))
        return lease

    def _lend(self, worker: str, after: int | None) -> Lease:
        loan = Lease("rollout", worker, self._new_id(worker), after, self.plan.trainers)
        self._loans.append(loan)
        return loan

    def _new_id(self, worker: str) -> str:
        self._submitted_at[worker] = self._now
        return f"{worker}-{next(self._count)}.{self._attempt}"

    def _log_again(self, lease: Lease) -> None:
        log.warning("%s; worker %s gets a new lease", self._sentence(lease), lease.worker)

    def _sentence(self, lease: Lease) -> str:
        end = self._ended[lease.lease_id]
        assert end is not None
        reason = str(end.error).partition("\n")[0]
        return f"lease {lease.lease_id} was lost ({type(end.error).__name__}: {reason})"
