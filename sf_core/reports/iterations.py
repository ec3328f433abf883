"""The iterations of a run as their manifests tell them: which are through, and when each began and ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory

Window = tuple[float, float]
"""Start and end, Unix seconds."""


@dataclass(frozen=True, slots=True)
class Iteration:
    number: int
    stages: Mapping[str, Manifest]
    """What is committed: the stages, and `evaluate` where this version was evaluated."""

    @property
    def is_through(self) -> bool:
        return all(stage in self.stages for stage in STAGES)

    @property
    def sampled_tokens(self) -> int:
        """Evaluations included; without those that were sampled before its window, by an earlier attempt."""
        last = self.stages["publish"].attempt
        return sum(m.data.get("sampled_tokens", 0) for m in self.stages.values() if m.attempt == last)


def read_iterations(run: RunDirectory, first: int = 0) -> Iterator[Iteration]:
    """In order, as far as a stage is committed; the last may not be through."""
    for number in count(first):
        found = {stage: run.read_manifest(number, stage) for stage in (*STAGES, "evaluate")}
        stages = {stage: manifest for stage, manifest in found.items() if manifest is not None}
        if not stages.keys() & set(STAGES):
            return
        yield Iteration(number, stages)


def iteration_windows(iterations: Iterable[Iteration]) -> dict[int, Window]:
    """By number, of those that are through: from the end of the iteration before to its own end; of the one
    that an attempt began with, from the start of the first stage that this attempt committed."""
    windows: dict[int, Window] = {}
    attempt, reached = None, 0.0
    for iteration in iterations:
        if iteration.is_through:
            last = iteration.stages["publish"]
            begun = next(s for s in map(iteration.stages.get, STAGES) if s and s.attempt == last.attempt)
            start = reached if last.attempt == attempt else begun.data["started_at"]
            attempt, reached = last.attempt, last.data["finished_at"]
            windows[iteration.number] = (start, reached)
    return windows
