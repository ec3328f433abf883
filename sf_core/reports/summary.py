"""Summary of a run, computed from its directory alone: summary.json and summary.png."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sf_core.config import RunConfig
from sf_core.process.environment_variables import command_started_at
from sf_core.reports.charts import draw_run
from sf_core.reports.iterations import Iteration, stage_time
from sf_core.reports.view import RunView
from sf_core.reports.warnings import run_warnings
from sf_core.scheduling.figures import by_worker, idle_by_cause
from sf_core.waits import rate
from storage.files import write_atomic


def summarise(view: RunView, config: RunConfig) -> dict[str, Any]:
    """Write summary.json and summary.png of a run whose iterations are all committed.

    tokens_generated counts the tokens of the sealed sessions: those of the batches, trained or not, and of
    the evaluations. tokens_sampled counts all that engines sampled, by the spans of the timeline: also those
    of groups that were dropped, of sessions that were cut, failed or not asked for any more, and of sessions
    that agents opened.
    seconds_rl is the time from the first `rollout` to the last `publish`, evaluations included, without the
    time between two attempts and what the first did of an iteration that the second finished;
    tokens_per_second counts the tokens of sealed sessions in it, and is null if the clocks of the processes
    disagree; idle_fraction is the share of it in which a
    device computed nothing, idle_by_cause divides that;
    runners has the CPU seconds per session of each worker of agents;
    late_reports and refused_reports count reports on sessions that had ended: those that came too late, and
    those that differed from the reports that ended the sessions;
    orchestration_seconds_per_iteration is what no stage accounts for: Prefect, Dask and manifests.
    """
    planned = config.train.iterations
    view = view.between(0, planned - 1)
    iterations = view.complete_iterations
    windows = list(view.windows.values())
    if len(iterations) < planned:
        raise ValueError(f"{view.run.run_id}: iteration {len(iterations)} is not committed")
    seconds_rl = sum(end - start for start, end in windows)
    evaluating = [stage_time(manifest) for k in view.held_out if (manifest := view.manifest(k, "evaluate"))]
    speed = rate(sum(i.sampled_tokens for i in iterations), seconds_rl)
    idle = {worker: idle_by_cause(own, windows, evaluating) for worker, own in by_worker(view.spans).items()}
    summary = {
        "run_id": view.run.run_id,
        "seed": config.seed,
        "reward_before": view.held_out.get(0),
        "reward_after": view.held_out.get(planned),
        "iterations": planned,
        "seconds_total": round(max(0.0, time.time() - _started_at(view)), 2),
        "seconds_rl": round(seconds_rl, 2),
        "tokens_generated": sum(
            m.data.get("sampled_tokens", 0) for i in iterations for m in i.stages.values()
        ),
        "tokens_sampled": view.tokens_sampled,
        "tokens_per_second": None if speed is None else round(speed, 1),
        "idle_fraction": {worker: round(sum(shares.values()), 4) for worker, shares in idle.items()},
        "idle_by_cause": idle,
        "runners": view.runners,
        "failures": view.failures,
        "late_reports": view.count_reports("late_reports"),
        "refused_reports": view.count_reports("refused_reports"),
        "concerns": run_warnings(view),
        "max_lag": max(i.stages["rollout"].data["max_lag"] for i in iterations),
        "orchestration_seconds_per_iteration": round(orchestration_seconds(iterations) / planned, 3),
    }
    view.run.write_summary(summary)
    chart = draw_run(
        rewards=[i.reward for i in iterations],
        evaluations=view.held_out,
        spans=view.spans,
        boundaries=[end for _, end in windows],
    )
    write_atomic(view.run.path("summary.png"), chart)
    return summary


def orchestration_seconds(iterations: Sequence[Iteration]) -> float:
    """Seconds in which no stage of an iteration worked, hand-over between iterations included."""
    total = 0.0
    for iteration in iterations:
        (reached, _) = iteration.window
        stages = iteration.stages.values()
        for start, end in sorted(map(stage_time, stages)):
            total += max(0.0, start - reached)
            reached = max(reached, end)
    return total


def _started_at(view: RunView) -> float:
    manifest = view.manifest(None, "start")
    assert manifest is not None
    started: float = manifest.data["started_at"]
    called = command_started_at()
    # a resumed run was called more than once; its first start is what the user waited for
    return min(started, called) if called else started
