"""The figures of a run for the report page, as lists and mappings that JSON can hold.

Owns which figures are shown. Their layout is in report.html and its scripts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, groupby
from typing import Any

import pyarrow as pa

from sf_core.reports import devices as device_report
from sf_core.reports.evaluations.answers import side_by_side
from sf_core.reports.evaluations.comparison import MEASURED, read_comparisons
from sf_core.reports.view import Iteration, RunView, kinds_in
from sf_core.scheduling.figures import Window
from sf_core.scheduling.timeline import Span, read_spans
from storage.batches import read_batch
from storage.errors import StorageError
from storage.manifests import Manifest
from storage.outcomes import outcomes_of
from storage.run_directory import STAGES, RunDirectory
from storage.trajectories import read_trajectories

TRAINING = ("entropy", "kl", "clip_fraction", "grad_norm", "length_mean")
"""Metrics of the train stage that are drawn if a run has them."""

TIMELINE_STEPS = 4000
"""Gaps shorter than the run divided by this are closed in the timeline: they would be invisible."""


def run_figures(view: RunView) -> dict[str, Any]:
    """All figures, without the sessions. Raises ValueError if a committed file is missing or broken."""
    run, iterations, windows = view.run, list(view.iterations()), view.windows()
    rollouts = [view.rollout_figures(iteration.number) for iteration in iterations]
    # writes, so only after the checks for broken files; without write access older figures are shown
    with suppress(StorageError):
        device_report.record_figures(view, len(iterations) - 1)
    devices = device_report.read_figures(run, range(len(iterations)))
    rows = [
        {
            "iteration": iteration.number,
            "seconds": _length(windows.get(iteration.number)),
            "sampled_tokens": iteration.sampled_tokens if iteration.is_through else None,
            "missing": [stage for stage in STAGES if stage not in iteration.stages],
            "rollout": None if rollout is None else asdict(rollout),
            "groups": kinds_in(iteration.stages.get("rollout")),
            "training": _training(iteration),
            "devices": devices.get(iteration.number, {}),
        }
        for iteration, rollout in zip(iterations, rollouts, strict=True)
    ]
    spans = read_spans(run)
    held_out = sorted(view.held_out_rewards(range(len(iterations) + 1)).items())
    return {
        "iterations": rows,
        "held_out": held_out,
        "answers": _answers(view, [version for version, _ in held_out]),
        "comparisons": read_comparisons(run.path(MEASURED)),
        "timeline": _timeline(spans, windows.values()),
        "tokens_sampled": sum(span.tokens for span in spans),
        "groups": list(chain.from_iterable(_groups(run, iteration) for iteration in iterations)),
    }


def _answers(view: RunView, versions: Sequence[int]) -> dict[str, Any]:
    """Answers to the same tasks of the first and the last version that were measured."""
    if len(versions) < 2:
        return {"before": None, "after": None, "pairs": []}
    before, after = versions[0], versions[-1]
    pairs = [[asdict(old), asdict(new)] for old, new in side_by_side(view, before, after)]
    return {"before": before, "after": after, "pairs": pairs}


def _length(window: Window | None) -> float | None:
    return None if window is None else window[1] - window[0]


def _training(iteration: Iteration) -> dict[str, float]:
    data = iteration.stages["train"].data if "train" in iteration.stages else {}
    return {name: data[name] for name in TRAINING if data.get(name) is not None}


def _timeline(spans: Sequence[Span], windows: Iterable[Window]) -> dict[str, Any]:
    begin = min((span.start for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    gap_s = (end - begin) / TIMELINE_STEPS
    by_worker = groupby(spans, key=lambda span: span.worker)
    return {
        "seconds": round(end - begin, 3),
        "boundaries": [round(window[1] - begin, 3) for window in windows],
        "workers": {worker: _bars(own, begin, gap_s) for worker, own in by_worker},
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


def _groups(run: RunDirectory, iteration: Iteration) -> list[list[Any]]:
    """Rows [iteration, group, task, rewards, decision]; the decision on a rejected group is the reason."""
    number, stages = iteration.number, iteration.stages
    rows = []
    if "filter" in stages:
        columns = ["group_id", "session_id", "task_id", "reward", "decision"]
        for ref in stages["filter"].outputs:
            rows += _group_rows(number, read_batch(run.path(ref.uri), columns))
    elif "rollout" in stages:
        columns = ["group_id", "session_id", "task_id", "reward"]
        for ref in stages["rollout"].files("trajectories"):
            table = read_trajectories(run.path(ref.uri), columns)
            waiting = pa.array(["not filtered yet"] * len(table), pa.string())
            rows += _group_rows(number, table.append_column("decision", waiting))
    if "rollout" in stages:
        rows += _rejected_rows(run, number, stages["rollout"])
    return rows


def _rejected_rows(run: RunDirectory, iteration: int, rollout: Manifest) -> list[list[Any]]:
    """Task and rewards of rejected groups are in the outcomes of runs that choose, and nowhere else."""
    if not (rejected := rollout.data["rejected"]):
        return []
    known = {str(row["number"]): row for row in outcomes_of(run, rollout)}
    nothing: dict[str, Any] = {"task_id": "", "rewards": []}
    told = ((index, reason, known.get(index, nothing)) for index, reason in rejected.items())
    return [
        [iteration, f"{run.run_id}.g{index}", row["task_id"], row["rewards"], reason]
        for index, reason, row in told
    ]


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
