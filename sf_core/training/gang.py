"""A rank's place in a gang, and how a gang fails. Light: flows and tasks import it, torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass

from storage.gangs import GangFiles


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank of one try at a train stage."""

    workers: tuple[str, ...]
    """The members of the gang, rank 0 first."""
    rank: int = 0
    epoch: int = 0
    """Counts the tries of one flow attempt at this stage; a later one supersedes it."""

    @property
    def is_alone(self) -> bool:
        return len(self.workers) == 1

    @property
    def label(self) -> str:
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.workers[rank]})"


class GangError(RuntimeError):
    """This rank cannot go on because of others: one is missing or failed, or the flow ended the try."""


class SupersededError(RuntimeError):
    """This rank must not work: Dask ran it again after its worker died, or its try is over."""


def check_counts(files: GangFiles) -> None:
    """Raises SupersededError if what this try writes would not count, but might replace what does."""
    if files.is_over() or files.is_committed():
        raise SupersededError(
            f"{files.label}: another try was begun or has committed, this one writes nothing"
        )
