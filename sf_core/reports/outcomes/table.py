"""`sf inspect --tasks`: the tasks of a run that chooses, by source, with the hardest and the easiest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from sf_core.config import RunConfig
from sf_core.recipes.gates import KINDS
from sf_core.recipes.outcomes import Success
from sf_core.reports.outcomes.figures import (
    SourceFigures,
    TaskFigures,
    count_sources,
    count_tasks,
    extreme_tasks,
)
from sf_core.reports.tables import make_printable, make_table, shorten_number
from sf_core.reports.view import RunView
from storage.tables.outcomes import read_outcomes

NUM_TASKS = 5
"""Number of the hardest tasks that are shown, and of the easiest."""

NAME_WIDTH = 30
"""Most characters of a name, so that a row fits 80 columns."""


def inspect_tasks(uri: str) -> RenderableType:
    """Tables of sources and tasks. Raises ValueError with one sentence if there is no run or a file is
    broken."""
    view = RunView.open(uri)
    rows = list(read_outcomes(view.run, before=len(view.read_committed("rollout"))))
    rollout = view.run.read_config(RunConfig).rollout
    if not rows:
        return Text(_absence_text(view.run.run_id, rollout.chooses))
    rules = rollout.curriculum
    tasks = count_tasks(rows, rollout.success or Success())
    named = sorted({source for stage in rules.stages for source in stage.shares}) if rules else []
    sources = count_sources(tasks, rules.pool if rules else None, named)
    hardest, easiest = extreme_tasks(tasks, NUM_TASKS)
    legend = "unseen, right, mixed, wrong: tasks, by their newest group\nshare: of right sessions"
    num_external = sum(row["task_index"] is None for row in rows)
    if num_external:
        legend += f"\nexternal groups, whose tasks are not ours: {num_external}"
    return Group(
        _sources_table(f"run {view.run.run_id}", sources),
        *([_tasks_table("\nhardest tasks", hardest)] if hardest else []),
        *([_tasks_table("\neasiest tasks", easiest)] if easiest else []),
        Text("\n" + legend, style="dim"),
    )


def _absence_text(run_id: str, chooses: bool) -> str:
    if chooses:
        return f"run {run_id}: no batch with outcomes of its groups is committed yet"
    return (
        f"run {run_id} has no outcomes of its groups: only runs with rollout.gate, rollout.curriculum, "
        "rollout.spare_sessions or rollout.least_sessions have them"
    )


def _sources_table(title: str, sources: dict[str, SourceFigures]) -> RenderableType:
    table = make_table(title)
    table.add_column("source", no_wrap=True, max_width=NAME_WIDTH)
    for name in ("unseen", *KINDS, "groups", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for source, found in sorted(sources.items()):
        numbers = [found.unseen, *(found.kinds[kind] for kind in KINDS), found.groups, found.tokens]
        table.add_row(Text(_source_name(source)), *map(_number_text, numbers))
    return table


def _tasks_table(title: str, tasks: Sequence[TaskFigures]) -> RenderableType:
    table = make_table(title)
    table.add_column("task", no_wrap=True, max_width=NAME_WIDTH)
    table.add_column("source", no_wrap=True, max_width=NAME_WIDTH // 2)
    for name in ("share", "sessions", "groups", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in tasks:
        names = (make_printable(task.task_id) or str(task.number), _source_name(task.source))
        cells: Iterable[str] = (
            f"{task.share:.2f}",
            *map(_number_text, (task.sessions, task.groups, task.tokens)),
        )
        table.add_row(*map(Text, names), *cells)
    return table


def _source_name(name: str) -> str:
    return make_printable(name) or "all"


def _number_text(value: int | None) -> str:
    return "" if value is None else shorten_number(value)
