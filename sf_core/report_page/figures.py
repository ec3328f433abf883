"""The figures of a run as the report page draws them: plain lists and mappings that JSON keeps.

Owns which figures are shown. How they look is report.html's and its scripts'.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from sf_core import report
from sf_core.scheduling.timeline import Span, idle_fraction, read_spans
from sf_core.summary import iteration_windows
from storage.batches import read_batch
from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory
from storage.trajectories import read_trajectories

TRAINING = ("loss", "entropy", "kl", "clip_fraction", "grad_norm", "length_mean", "learning_rate")
"""Metrics of the train stage that are drawn where a run has them."""

TIMELINE_STEPS = 4000
"""Gaps shorter than this part of the run are closed in the timeline: nobody could see them."""


def run_figures(run: RunDirectory) -> dict[str, Any]:
    """Everything but the sessions. Raises ValueError if a committed file is missing or broken."""
    manifests = _committed(run)
    spans = read_spans(run)
    windows = iteration_windows(
        list(itertools.takewhile(lambda stages: all(stage in stages for stage in STAGES), manifests))
    )
    workers = sorted({span.worker for span in spans})
    iterations = [
        {
            "iteration": row.iteration,
            "stages": list(row.committed),
            "rollout": None if row.rollout is None else asdict(row.rollout),
            "training": _training(manifests[row.iteration]),
        }
        for row in report.iteration_figures(run)
    ]
    for row, window in zip(iterations, windows, strict=False):
        row["seconds"] = window[1] - window[0]
    by_worker = {worker: [span for span in spans if span.worker == worker] for worker in workers}
    return {
        "run_id": run.run_id,
        "iterations": iterations,
        "held_out": sorted(report.held_out_rewards(run, len(iterations) + 1).items()),
        "idle": {worker: _idle_shares(by_worker[worker], windows) for worker in workers},
        "timeline": _timeline(by_worker, windows),
        "groups": list(itertools.chain.from_iterable(_groups(run, k, m) for k, m in enumerate(manifests))),
    }


def _committed(run: RunDirectory) -> list[dict[str, Manifest]]:
    """The manifests of every iteration of which a stage is committed."""
    found = []
    for number in itertools.count():
        stages = {stage: m for stage in STAGES if (m := run.read_manifest(number, stage)) is not None}
        if not stages:
            return found
        found.append(stages)
    raise AssertionError("unreachable")


def _training(stages: dict[str, Manifest]) -> dict[str, float]:
    data = stages["train"].data if "train" in stages else {}
    return {name: data[name] for name in TRAINING if data.get(name) is not None}


def _idle_shares(spans: list[Span], windows: list[tuple[float, float]]) -> list[float]:
    """Share of each iteration in which the device computed nothing."""
    starts, ends = np.array([span.start for span in spans]), np.array([span.end for span in spans])
    shares = []
    for window in windows:
        inside = np.flatnonzero((ends > window[0]) & (starts < window[1]))
        shares.append(idle_fraction([spans[i] for i in inside], window))
    return shares


def _timeline(by_worker: dict[str, list[Span]], windows: list[tuple[float, float]]) -> dict[str, Any]:
    every = list(itertools.chain.from_iterable(by_worker.values()))
    begin = min((span.start for span in every), default=0.0)
    end = max((span.end for span in every), default=0.0)
    gap_s = (end - begin) / TIMELINE_STEPS
    return {
        "seconds": round(end - begin, 3),
        "boundaries": [round(window[1] - begin, 3) for window in windows],
        "workers": {worker: _bars(spans, begin, gap_s) for worker, spans in by_worker.items()},
    }


def _bars(spans: Iterable[Span], begin: float, gap_s: float) -> list[list[Any]]:
    """[tag, kind, label, start, end] with seconds since `begin`; near neighbours of one sort become one."""
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


def _groups(run: RunDirectory, iteration: int, stages: dict[str, Manifest]) -> list[list[Any]]:
    """[iteration, group, task, rewards, decision] of every group, the rejected ones with their reason."""
    rows = []
    if "filter" in stages:
        columns = ["group_id", "session_id", "task_id", "reward", "decision"]
        for ref in stages["filter"].outputs:
            rows += _group_rows(iteration, read_batch(run.path(ref.uri), columns))
    elif "rollout" in stages:
        columns = ["group_id", "session_id", "task_id", "reward"]
        for ref in stages["rollout"].outputs:
            table = read_trajectories(run.path(ref.uri), columns)
            waiting = pa.array(["not filtered yet"] * len(table), pa.string())
            rows += _group_rows(iteration, table.append_column("decision", waiting))
    if "rollout" in stages:
        rejected = stages["rollout"].data.get("rejected", {})
        rows += [[iteration, f"group {index}", "", [], reason] for index, reason in rejected.items()]
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
