"""A rank's place in a gang, and the errors of a gang. Imports no torch, because flows and tasks import it."""

from __future__ import annotations

from dataclasses import dataclass

from storage.gangs import GangFiles


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
