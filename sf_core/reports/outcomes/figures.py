"""Counts of the groups of runs that choose: by batch from manifests, by source and task from the rows of
`outcomes`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sf_core.recipes.gates import KINDS, Kind, kind_of, num_right
from sf_core.recipes.outcomes import Result, Success
from sf_core.reports.evaluations.judgements import judge_metrics
from sf_core.reports.iterations import kinds_in
from storage.manifests import Manifest

LENGTHS = ("length_kept", "length_cut", "cut_sessions")
"""Facts of a rollout with spare sessions."""

Row = Mapping[str, Any]
"""A row of `outcomes` (storage/tables/outcomes.py)."""


def rollout_metrics(manifest: Manifest | None) -> dict[str, float]:
    """Metrics of the batch of a train step: numbers of groups if the run chooses, of judges, and of values
    that environments noted. Unknown metrics are left out."""
    if manifest is None:
        return {}
    groups = {f"groups_{kind}": number for kind, number in (kinds_in(manifest) or {}).items()}
    lengths = {name: manifest.data.get(name) for name in LENGTHS}
    known = {name: float(value) for name, value in (groups | lengths).items() if value is not None}
    return known | judge_metrics(manifest.data)


@dataclass(slots=True)
class TaskFigures:
    """One task in the groups that have left."""

    source: str
    number: int
    task_id: str = ""
    groups: int = 0
    sessions: int = 0
    """Sessions that counted."""
    right: int = 0
    tokens: int = 0
    newest: tuple[int, Kind] | None = None
    """The newest group in which sessions counted, and whether all, some or none of them were right."""

    @property
    def share(self) -> float:
        return self.right / self.sessions if self.sessions else 0.0

    def add(self, row: Row, success: Success) -> None:
        columns = zip(row["rewards"], row["scores"], row["tokens"], row["statuses"], strict=True)
        results = [Result(*result) for result in columns]
        self.task_id = row["task_id"] or self.task_id
        self.groups += 1
        self.sessions += len(results)
        self.right += num_right(results, success)
        self.tokens += sum(result.tokens for result in results)
        if results and (self.newest is None or row["number"] > self.newest[0]):
            self.newest = (row["number"], kind_of(results, success))


@dataclass(slots=True)
class SourceFigures:
    """One source of tasks. A task counts by its newest group, so unseen ones and the three kinds add up to
    the pool."""

    unseen: int | None
    """Tasks of the pool in which no session has counted yet; None if there is no pool."""
    kinds: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    groups: int = 0
    tokens: int = 0


def count_tasks(rows: Iterable[Row], success: Success) -> list[TaskFigures]:
    """Figures of every task of which a group has left, by source and number. External groups have no task
    of ours."""
    tasks: dict[tuple[str, int], TaskFigures] = {}
    for row in rows:
        if (number := row["task_index"]) is not None:
            key = (row["source"], number)
            tasks.setdefault(key, TaskFigures(*key)).add(row, success)
    return [tasks[key] for key in sorted(tasks)]


def count_sources(
    tasks: Iterable[TaskFigures], pool: int | None, sources: Iterable[str] = ()
) -> dict[str, SourceFigures]:
    """Figures by source. `sources` have a row even if none of their tasks was sampled."""
    found = {source: SourceFigures(pool) for source in sources}
    for task in tasks:
        figures = found.setdefault(task.source, SourceFigures(pool))
        figures.groups += task.groups
        figures.tokens += task.tokens
        if task.newest is not None:
            figures.kinds[task.newest[1]] += 1
            # of an earlier attempt's larger pool there may be more
            if figures.unseen and task.number < (pool or 0):
                figures.unseen -= 1
    return found


def extreme_tasks(tasks: Sequence[TaskFigures], most: int) -> tuple[list[TaskFigures], list[TaskFigures]]:
    """The tasks with the smallest share of right sessions, and those with the largest, at most `most` of
    each and none in both. Among equal shares those come first that cost most tokens."""
    measured = [task for task in tasks if task.sessions]
    ranked = sorted(measured, key=lambda task: (task.share, -task.tokens))
    num_hardest = min(most, -(-len(measured) // 2))
    easiest = sorted(ranked[num_hardest:], key=lambda task: (-task.share, -task.tokens))
    return ranked[:num_hardest], easiest[:most]
