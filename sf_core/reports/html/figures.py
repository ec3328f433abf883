"""The figures of a run for the report page, as lists and mappings that JSON can hold.

Owns which figures are shown. Their layout is in report.html and its scripts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from sf_core.reports.evaluations.comparison import compare_ends, read_comparisons
from sf_core.reports.evaluations.judgements import judge_rows
from sf_core.reports.iterations import Iteration
from sf_core.reports.timeline import record_devices
from sf_core.reports.view import RunView
from sf_core.scheduling.figures import by_worker
from sf_core.scheduling.timeline import Span
from sf_core.waits import Window
from storage.errors import StorageError
from storage.run_directory import STAGES
from storage.tables.batches import read_batch
from storage.tables.trajectories import read_trajectories

TRAINING = ("entropy", "kl", "teacher_kl", "clip_fraction", "grad_norm", "length_mean")
"""Metrics of the train stage that are drawn if a run has them."""

TIMELINE_STEPS = 4000
"""Gaps shorter than the run divided by this are closed in the timeline: they would be invisible."""


def page_figures(view: RunView) -> dict[str, Any]:
    """All figures, without the sessions. Raises ValueError if a committed file is missing or broken."""
    rollouts = {number: asdict(figures) for number, figures in view.rollouts.items()}
    # writes, so only after the checks for broken files; without write access older figures are shown
    with suppress(StorageError):
        record_devices(view, len(view.iterations) - 1)
    rows = [
        {
            "iteration": number,
            "seconds": iteration.seconds if iteration.is_complete else None,
            "sampled_tokens": iteration.sampled_tokens if iteration.is_complete else None,
            "missing": [stage for stage in STAGES if stage not in iteration.stages],
            "rollout": rollouts.get(number),
            "groups": iteration.kinds,
            "training": _training_metrics(iteration),
            "devices": view.devices.get(number, {}),
        }
        for number, iteration in enumerate(view.iterations)
    ]
    before, after, examples = compare_ends(view, view.held_out)
    pairs = [[asdict(old), asdict(new)] for old, new in examples.pairs]
    answers = {"before": before, "after": after, "pairs": pairs, "selection": examples.selection}
    return {
        "iterations": rows,
        "held_out": sorted(view.held_out.items()),
        "answers": answers,
        "comparisons": read_comparisons(view.run.measured_dir),
        "timeline": _timeline_figures(view.spans, view.windows.values()),
        "tokens_sampled": view.tokens_sampled,
        "judges": judge_rows(view.iterations),
        "groups": [row for iteration in view.iterations for row in _iteration_groups(view, iteration)],
    }


def _training_metrics(iteration: Iteration) -> dict[str, float]:
    data = iteration.stages["train"].data if "train" in iteration.stages else {}
    return {name: data[name] for name in TRAINING if data.get(name) is not None}


def _timeline_figures(spans: Sequence[Span], windows: Iterable[Window]) -> dict[str, Any]:
    begin = min((span.start for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    gap_s = (end - begin) / TIMELINE_STEPS
    return {
        "seconds": round(end - begin, 3),
        "boundaries": [round(window[1] - begin, 3) for window in windows],
        "workers": {worker: _bars(own, begin, gap_s) for worker, own in by_worker(spans).items()},
    }


def _bars(spans: Iterable[Span], begin: float, gap_s: float) -> list[list[Any]]:
    """Bars [tag, kind, label, start, end] in seconds since `begin`; close ones of one sort are merged."""
    sorts: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    for span in spans:
        bars = sorts[span.tag, span.kind, span.label]
        if bars and span.start - bars[-1][1] <= gap_s:
            bars[-1][1] = max(bars[-1][1], span.end)
        else:
            bars.append([span.start, span.end])
    return [
        [*sort, round(start - begin, 3), round(end - begin, 3)]
        for sort, bars in sorts.items()
        for start, end in bars
    ]


def _iteration_groups(view: RunView, iteration: Iteration) -> list[list[Any]]:
    """Rows [iteration, group, task, rewards, decision]; the decision on a rejected group is the reason."""
    run = view.run
    number = iteration.number
    stages = iteration.stages
    rows = []
    if "filter" in stages:
        columns = ["group_id", "session_id", "task_id", "reward", "decision"]
        for ref in stages["filter"].files("batches"):
            rows += _group_rows(number, read_batch(run.path(ref.uri), columns))
    elif "rollout" in stages:
        columns = ["group_id", "session_id", "task_id", "reward"]
        for ref in stages["rollout"].files("trajectories"):
            table = read_trajectories(run.path(ref.uri), columns)
            waiting = pa.array(["not filtered yet"] * len(table), pa.string())
            rows += _group_rows(number, table.append_column("decision", waiting))
    if "rollout" in stages:
        rows += [
            [number, group, row.get("task_id", ""), row.get("rewards", []), why]
            for group, why, row in view.read_rejected(stages["rollout"])
        ]
    return rows


def _group_rows(iteration: int, table: pa.Table) -> list[list[Any]]:
    groups: dict[str, list[Any]] = {}
    seen = set()
    for row in table.to_pylist():
        group = groups.setdefault(row["group_id"], [iteration, row["group_id"], row["task_id"], [], set()])
        if row["session_id"] not in seen:  # a session counts once, whatever its branches
            seen.add(row["session_id"])
            group[3].append(row["reward"])
        group[4].add(row["decision"])
    return [[*group[:4], ", ".join(sorted(group[4]))] for group in groups.values()]
