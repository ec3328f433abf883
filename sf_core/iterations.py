"""The iterations of a run as their manifests tell them: which are through, and when each began and ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory


@dataclass(frozen=True, slots=True)
class Iteration:
    number: int
    stages: Mapping[str, Manifest]
    """What is committed: the stages, and `evaluate` where this version was evaluated."""

    @property
    def is_through(self) -> bool:
        return all(stage in self.stages for stage in STAGES)


def read_iterations(run: RunDirectory, first: int = 0) -> Iterator[Iteration]:
    """In order, as far as a stage is committed; the last may not be through."""
    for number in count(first):
        found = {stage: run.read_manifest(number, stage) for stage in (*STAGES, "evaluate")}
        stages = {stage: manifest for stage, manifest in found.items() if manifest is not None}
        if not stages.keys() & set(STAGES):
            return
        yield Iteration(number, stages)


def iteration_windows(iterations: Sequence[Mapping[str, Manifest]]) -> list[tuple[float, float]]:
    """From the end of one iteration to the end of the next, Unix seconds; the first of an attempt from its
    own start."""
    windows: list[tuple[float, float]] = []
    attempt = None
    for stages in iterations:
        first, last = stages["rollout"], stages["publish"]
        start = windows[-1][1] if first.attempt == attempt else first.data["started_at"]
        windows.append((start, last.data["finished_at"]))
        attempt = last.attempt
    return windows
