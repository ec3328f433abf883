"""What happened in a run, computed from its directory alone: summary.json and the picture beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from sf_core.config import RunConfig
from sf_core.iterations import Iteration, iteration_windows, read_iterations
from sf_core.picture import draw_run
from sf_core.report import held_out_rewards
from sf_core.scheduling.timeline import Span, idle_fraction, read_spans
from sf_core.settings import command_started_at
from storage.files import write_atomic
from storage.run_directory import RunDirectory


def summarise(directory: RunDirectory, config: RunConfig) -> dict[str, Any]:
    """Write summary.json and summary.png of a run whose iterations are all committed.

    seconds_rl is the time from the first `rollout` to the last `publish`, evaluations included, without the
    time between two attempts and what the first of them did of an iteration that the other one ended;
    tokens_per_second counts what was sampled in it, idle_fraction is the share of it in which a device
    computed nothing;
    orchestration_seconds_per_iteration is what no stage accounts for: Prefect, Dask and manifests.
    """
    iterations = list(islice(read_iterations(directory), config.train.iterations))
    evaluations = held_out_rewards(directory, config.train.iterations + 1)
    windows = list(iteration_windows(iterations).values())
    if len(windows) < config.train.iterations:
        raise ValueError(f"{directory.run_id}: iteration {len(windows)} is not committed")
    spans = read_spans(directory)
    seconds_rl = sum(end - start for start, end in windows)
    tokens = sum(m.data.get("sampled_tokens", 0) for i in iterations for m in i.stages.values())
    summary = {
        "run_id": directory.run_id,
        "seed": config.seed,
        "reward_before": evaluations.get(0),
        "reward_after": evaluations.get(config.train.iterations),
        "iterations": len(iterations),
        "seconds_total": round(time.time() - _started_at(directory), 2),
        "seconds_rl": round(seconds_rl, 2),
        "tokens_generated": tokens,
        "tokens_per_second": round(sum(i.sampled_tokens for i in iterations) / seconds_rl, 1),
        "idle_fraction": {
            worker: _idle([span for span in spans if span.worker == worker], windows)
            for worker in sorted({span.worker for span in spans})
        },
        "max_lag": max(i.stages["rollout"].data["max_lag"] for i in iterations),
        "orchestration_seconds_per_iteration": round(orchestration_seconds(iterations) / len(iterations), 3),
    }
    directory.write_summary(summary)
    picture = draw_run(
        rewards=[i.stages["rollout"].data["reward_mean"] for i in iterations],
        evaluations=evaluations,
        spans=spans,
        boundaries=[end for _, end in windows],
    )
    write_atomic(directory.path("summary.png"), picture)
    return summary


def orchestration_seconds(iterations: Sequence[Iteration]) -> float:
    """Seconds in which no stage of an iteration worked, hand-over between iterations included."""
    total = 0.0
    for (reached, _), iteration in zip(iteration_windows(iterations).values(), iterations, strict=True):
        stages = iteration.stages.values()
        for start, end in sorted((m.data["started_at"], m.data["finished_at"]) for m in stages):
            total += max(0.0, start - reached)
            reached = max(reached, end)
    return total


def _idle(spans: list[Span], windows: list[tuple[float, float]]) -> float:
    length = sum(end - start for start, end in windows)
    idle = sum(idle_fraction(spans, window) * (window[1] - window[0]) for window in windows)
    return round(idle / length, 4) if length else 0.0


def _started_at(directory: RunDirectory) -> float:
    manifest = directory.read_manifest(None, "start")
    assert manifest is not None
    started: float = manifest.data["started_at"]
    called = command_started_at()
    # a resumed run was called more than once; its first start is what the user waited for
    return min(started, called) if called else started
