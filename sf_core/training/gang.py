"""The attempts of a gang at a train stage: who trains, who is late, who is to blame, and how a rank begins
and waits for the others. What ranks exchange is their backend's. Imports no torch, because flows and
tasks import it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from sf_core.config import RunConfig
from sf_core.scheduling.plan import Worker, choose_trainers
from storage.gangs import GangFiles

T = TypeVar("T")

MAX_ATTEMPTS = 3

POLL_S = 0.02
FILES_POLL_S = 1.0
"""Time between looks at whether the flow has ended the attempt, which may be requests to an object store."""


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """One rank of one attempt at a train stage."""

    workers: tuple[str, ...]
    """Names of the gang's workers, rank 0 first."""
    rank: int = 0
    step_attempt: int = 0
    """Counts the attempts at this stage within one attempt of the flow; a later one supersedes it."""

    @property
    def is_alone(self) -> bool:
        return len(self.workers) == 1

    @property
    def label(self) -> str:
        return self.name_of(self.rank)

    @property
    def other_ranks(self) -> list[int]:
        return [rank for rank in range(len(self.workers)) if rank != self.rank]

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.workers[rank]})"

    def blame(self, ranks: list[int], what_happened: str) -> GangError:
        """The error of this rank that names the ranks that keep it from going on."""
        return GangError(f"{self.label}: {', '.join(map(self.name_of, ranks))} {what_happened}")


class GangError(RuntimeError):
    """This rank cannot go on because of others: one is missing or failed, or the flow ended the attempt."""


class SupersededError(RuntimeError):
    """This rank must not work: Dask restarted it after its worker died, or its attempt is over."""


def check_counts(files: GangFiles) -> None:
    """Raises SupersededError if another attempt has begun or committed, whose files this one might
    overwrite."""
    if files.is_over() or files.is_committed():
        raise SupersededError(
            f"{files.label}: another attempt has begun or committed, so this attempt writes nothing"
        )


def check_goes_on(files: GangFiles) -> None:
    """Raises SupersededError if another attempt at the step or of the flow has begun. This one may have
    committed."""
    if files.is_over():
        raise SupersededError(
            f"{files.label}: another attempt has begun, so this attempt writes nothing more"
        )


Meet = Callable[[GangFiles, RankAssignment, str, float], AbstractContextManager[T]]


@contextmanager
def join_gang(
    meet: Meet[T], files: GangFiles, assignment: RankAssignment, host: str, timeout_s: float
) -> Iterator[T]:
    """Begin as a rank, meet the other ranks, run the block; ends when rank 0 has finished it.

    `meet` is that of a TrainerBackend, `host` the address of this worker. Raises SupersededError if this rank
    must not work, GangError if another one is missing or has failed, and what the block raises."""
    if files.is_over() or not files.begin_rank(assignment.rank, once=not assignment.is_alone):
        raise SupersededError(
            f"{assignment.label}: attempt {assignment.step_attempt} already started on this worker or is "
            "over, so the rank stops"
        )
    with meet(files, assignment, host, timeout_s) as ranks:
        yield ranks


def wait_for(
    files: GangFiles,
    assignment: RankAssignment,
    poll: Callable[[], T | None],
    missing: Callable[[], list[int]],
    what_happened: str,
    timeout_s: float,
) -> T:
    """Look until there is something, and return it. Raises GangError if the flow has ended the attempt, or
    after `timeout_s`; then it says of the `missing` ranks `what` they have not done."""
    deadline = time.monotonic() + timeout_s
    files_looked_at = -FILES_POLL_S
    while (answer := poll()) is None:
        now = time.monotonic()
        if now > files_looked_at + FILES_POLL_S:
            files_looked_at = now
            if files.is_over():
                raise GangError(f"{assignment.label}: the flow ended attempt {assignment.step_attempt}")
        if now > deadline:
            raise assignment.blame(missing(), f"{what_happened} within {timeout_s:g} s")
        time.sleep(POLL_S)
    return answer


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended."""

    error: BaseException | None = None
    fault: Literal["rank", "worker", "others"] = "rank"
    """Cause of the error: the rank itself, the loss of its worker, or other ranks."""


@dataclass(frozen=True, slots=True)
class RanksWait:
    """A look at ranks that have not all ended."""

    away: list[str]
    """Workers of unfinished ranks that are not connected."""
    fence: bool
    """Whether the other ranks are to be told now that this attempt is over."""
    give_up: bool
    """Whether the unfinished ranks are awaited no longer."""
    restarted: list[str]
    """Workers whose process has changed since the attempt began. Dask runs there again what it had, and a
    lease that had ended may come before the rank."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that has ended without a commit."""

    error: BaseException
    is_final: bool
    """Whether there is no attempt left."""
    unfinished: list[str]
    """Workers to kill: their ranks may hang, or go on in vain, and no later attempt shares a device with
    them."""


Lent = tuple[str, str]
"""A worker and the id of a lease on it."""


class GangPlan:
    """The attempts at the train stage of one iteration: on which workers, which of them are late, which are
    to blame, and whether and where to attempt it again. Facts in, decisions out: no clock, no IO."""

    def __init__(self, trainers: tuple[str, ...], config: RunConfig, connected: Container[str]) -> None:
        """Without trainers there is nothing to do. If some are away but `train.min_workers` are there, these
        begin."""
        self._config = config
        self._planned = trainers
        self.step_attempt = -1
        """Number of this attempt."""
        self.workers = trainers
        """Workers of this attempt, rank 0 first."""
        connected_trainers = tuple(worker for worker in trainers if worker in connected)
        if (fewest := config.train.min_workers) and len(connected_trainers) >= fewest and len(trainers) > 1:
            self.workers = connected_trainers[: config.train.largest_gang(len(connected_trainers))]
        self._blamed: set[str] = set()
        self._begin_waits()

    def begin_attempt(self) -> list[RankAssignment]:
        self.step_attempt += 1
        self._begin_waits()
        return [RankAssignment(self.workers, rank, self.step_attempt) for rank in range(len(self.workers))]

    def _begin_waits(self) -> None:
        self._revoked: set[Lent] = set()
        self._yielding: Collection[str] = ()
        self._addresses: Mapping[str, str] = {}
        self._seen: dict[str, float] = {}
        self._deadline: float | None = None

    @property
    def yield_s(self) -> float:
        """Longest time until all ranks have begun; those of a later attempt may have to wait for workers."""
        config = self._config
        return config.cluster.yield_timeout_s + (config.train.gang_timeout_s if self.step_attempt else 0)

    def revoke_first(self, lent: Iterable[Lent], addresses: Mapping[str, str]) -> set[Lent]:
        """Leases to revoke first, of those lent when the iteration began. `addresses` are those of connected
        workers by name: of the processes that hold the devices."""
        is_first = self.step_attempt == 0
        self._addresses = addresses
        self._revoked = {lease for lease in lent if lease[0] in self.workers and is_first}
        # the lease on a worker that replaces another may be known only once it has begun there
        self._yielding = {worker for worker, _ in self._revoked} if is_first else self.workers
        return self._revoked

    def late(self, begun: Container[str], addresses: Mapping[str, str]) -> list[str]:
        """Workers whose rank has not begun because something holds the device, which nothing does if the
        worker is away or was restarted, since when it has another address."""
        return [
            worker
            for worker in self.workers
            if worker in self._yielding and worker not in begun
            if worker in addresses and addresses[worker] == self._addresses.get(worker)
        ]

    def revoke_next(self, holding: Iterable[Lent]) -> set[Lent]:
        """Leases that hold devices of late workers and were not revoked before."""
        unrevoked = set(holding) - self._revoked
        self._revoked = self._revoked | unrevoked
        return unrevoked

    def observe(self, now: float, addresses: Mapping[str, str], ends: Mapping[str, RankEnd]) -> RanksWait:
        """Once rank 0 has ended, or a rank has failed, or its worker was away for too long, the others have
        `gang_timeout_s` to end. `addresses` are those of connected workers, `ends` those of the ranks that
        have ended, by worker."""
        unfinished = [worker for worker in self.workers if worker not in ends]
        away = [worker for worker in unfinished if worker not in addresses]
        restarted = []
        for worker in unfinished:
            address = addresses.get(worker)
            if address is not None and address != self._addresses.get(worker, address):
                restarted.append(worker)
        for worker in self.workers:
            # at the first look all count as there
            if worker not in away or worker not in self._seen:
                self._seen[worker] = now
        patience_s = self._config.train.gang_timeout_s
        has_error = any(end.error is not None for end in ends.values())
        is_gone = any(now - self._seen[worker] > patience_s for worker in away)
        failed = has_error or is_gone
        begins = self._deadline is None and (failed or self.workers[0] in ends)
        if begins:
            self._deadline = now + patience_s
        is_late = self._deadline is not None and (now > self._deadline or len(away) == len(unfinished))
        return RanksWait(away, fence=begins and failed, give_up=is_late, restarted=restarted)

    def judge(self, ends: Mapping[str, RankEnd]) -> Failure:
        """What follows if nothing is committed. There is no attempt left if all ranks have failed by
        themselves, or after `MAX_ATTEMPTS`."""
        unfinished = [worker for worker in self.workers if worker not in ends]
        errors = {worker: end.error for worker, end in ends.items() if end.error is not None}
        own = [error for worker, error in errors.items() if ends[worker].fault == "rank"]
        at_fault = [worker for worker in errors if ends[worker].fault != "others"]
        self._blamed = {*unfinished, *at_fault}
        away_s = self._config.train.gang_timeout_s
        absence = GangError(f"{', '.join(unfinished)} left and did not come back within {away_s:g} s")
        reason = [*own, *errors.values(), absence][0]
        is_final = len(own) == len(self.workers) or self.step_attempt + 1 == MAX_ATTEMPTS
        return Failure(reason, is_final, unfinished)

    def choose_again(self, connected: Collection[Worker]) -> None:
        """Choose the workers of the next attempt as at the start of the run. Those that were lost, restarted
        by their nannies, or failed are included only if the others are too few. Raises ValueError while all
        together are too few."""
        unblamed = [worker for worker in connected if worker.name not in self._blamed]
        try:
            chosen = choose_trainers(unblamed, self._config, trained=self._planned)
        except ValueError:
            chosen = choose_trainers([*connected], self._config, trained=self._planned)
        self.workers = tuple(worker.name for worker in chosen)
