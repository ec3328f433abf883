"""A rank's place in a gang: how it is taken, how ranks wait for each other, and the errors of a gang.

Imports no torch, because flows and tasks import it. What ranks exchange is their trainer backend's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from storage.gangs import GangFiles

T = TypeVar("T")

POLL_S = 0.02
FILES_POLL_S = 1.0
"""Time between looks at whether the flow has ended the try, which may be requests to an object store."""


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """One rank of one try at a train stage."""

    workers: tuple[str, ...]
    """Names of the gang's workers, rank 0 first."""
    rank: int = 0
    epoch: int = 0
    """Counts the tries of one flow attempt at this stage; a later one supersedes it."""

    @property
    def is_alone(self) -> bool:
        return len(self.workers) == 1

    @property
    def label(self) -> str:
        return self.name_of(self.rank)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self.workers)) if rank != self.rank]

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.workers[rank]})"

    def blame(self, ranks: list[int], what: str) -> GangError:
        """The error of this rank that names the ranks that keep it from going on."""
        return GangError(f"{self.label}: {', '.join(map(self.name_of, ranks))} {what}")


class GangError(RuntimeError):
    """This rank cannot go on because of others: one is missing or failed, or the flow ended the try."""


class SupersededError(RuntimeError):
    """This rank must not work: Dask restarted it after its worker died, or its try is over."""


def check_counts(files: GangFiles) -> None:
    """Raises SupersededError if another try has begun or committed, whose files this one might overwrite."""
    if files.is_over() or files.is_committed():
        raise SupersededError(
            f"{files.label}: another try was begun or has committed, this one writes nothing"
        )


Meet = Callable[[GangFiles, RankAssignment, str, float], AbstractContextManager[T]]


@contextmanager
def seated(meet: Meet[T], files: GangFiles, seat: RankAssignment, host: str, timeout_s: float) -> Iterator[T]:
    """Take a seat, meet the other ranks, run the block; ends when rank 0 has finished it.

    `meet` is that of a TrainerBackend, `host` the address of this worker. Raises SupersededError if this rank
    must not work, GangError if another one is missing or has failed, and what the block raises."""
    if files.is_over() or not files.take_seat(seat.rank, once=not seat.is_alone):
        raise SupersededError(f"{seat.label}: try {seat.epoch} had begun here before, or is over")
    with meet(files, seat, host, timeout_s) as ranks:
        yield ranks


def wait_for(
    files: GangFiles,
    seat: RankAssignment,
    look: Callable[[], T | None],
    missing: Callable[[], list[int]],
    what: str,
    timeout_s: float,
) -> T:
    """Look until there is something, and return it. Raises GangError if the flow has ended the try, or after
    `timeout_s`; then it says of the `missing` ranks `what` they have not done."""
    deadline, files_looked_at = time.monotonic() + timeout_s, -FILES_POLL_S
    while (found := look()) is None:
        now = time.monotonic()
        if now > files_looked_at + FILES_POLL_S:
            files_looked_at = now
            if files.is_over():
                raise GangError(f"{seat.label}: the flow ended try {seat.epoch}")
        if now > deadline:
            raise seat.blame(missing(), f"{what} within {timeout_s:g} s")
        time.sleep(POLL_S)
    return found
