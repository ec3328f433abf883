"""Summary of a run, computed from its directory alone: summary.json and summary.png."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.failures import sum_failures
from sf_core.reports.concerns import summed_concerns
from sf_core.reports.pictures import draw_run
from sf_core.reports.view import Iteration, RunView, failures_of
from sf_core.scheduling.figures import Window, by_worker, idle_by_cause
from sf_core.scheduling.timeline import read_spans
from sf_core.surroundings import command_started_at
from storage.files import write_atomic


def summarise(view: RunView, config: RunConfig) -> dict[str, Any]:
    """Write summary.json and summary.png of a run whose iterations are all committed.

    tokens_generated counts the tokens of the sealed sessions: those of the batches, trained or not, and of
    the evaluations. tokens_sampled counts all that engines sampled, by the spans of the timeline: also those
    of groups that were dropped, of sessions that were cut, failed or not asked for any more, and of sessions
    that agents opened.
    seconds_rl is the time from the first `rollout` to the last `publish`, evaluations included, without the
    time between two attempts and what the first did of an iteration that the second finished;
    tokens_per_second counts the tokens of sealed sessions in it, idle_fraction is the share of it in which a
    device computed nothing, idle_by_cause divides that;
    orchestration_seconds_per_iteration is what no stage accounts for: Prefect, Dask and manifests.
    """
    directory = view.run
    iterations = [i for i in view.iterations() if i.is_through][: config.train.iterations]
    if len(iterations) < config.train.iterations:
        raise ValueError(f"{directory.run_id}: iteration {len(iterations)} is not committed")
    evaluations = view.held_out_rewards(range(config.train.iterations + 1))
    windows, spans = [iteration.window for iteration in iterations], read_spans(directory)
    seconds_rl = sum(end - start for start, end in windows)
    tokens = sum(m.data.get("sampled_tokens", 0) for i in iterations for m in i.stages.values())
    asked = list(_evaluation_times(view, evaluations))
    idle = {worker: idle_by_cause(own, windows, asked) for worker, own in sorted(by_worker(spans).items())}
    summary = {
        "run_id": directory.run_id,
        "seed": config.seed,
        "reward_before": evaluations.get(0),
        "reward_after": evaluations.get(config.train.iterations),
        "iterations": len(iterations),
        "seconds_total": round(time.time() - _started_at(view), 2),
        "seconds_rl": round(seconds_rl, 2),
        "tokens_generated": tokens,
        "tokens_sampled": sum(span.tokens for span in spans),
        "tokens_per_second": round(sum(i.sampled_tokens for i in iterations) / seconds_rl, 1),
        "idle_fraction": {worker: round(sum(shares.values()), 4) for worker, shares in idle.items()},
        "idle_by_cause": idle,
        "failures": sum_failures(failures_of(i.stages["rollout"]) for i in iterations),
        "concerns": summed_concerns(view, config),
        "max_lag": max(i.stages["rollout"].data["max_lag"] for i in iterations),
        "orchestration_seconds_per_iteration": round(orchestration_seconds(iterations) / len(iterations), 3),
    }
    directory.write_summary(summary)
    picture = draw_run(
        rewards=[i.reward for i in iterations],
        evaluations=evaluations,
        spans=spans,
        boundaries=[end for _, end in windows],
    )
    write_atomic(directory.path("summary.png"), picture)
    return summary


def _evaluation_times(view: RunView, versions: Iterable[int]) -> Iterator[Window]:
    manifests = (view.manifest(version, "evaluate") for version in versions)
    return ((m.data["started_at"], m.data["finished_at"]) for m in manifests if m is not None)


def orchestration_seconds(iterations: Sequence[Iteration]) -> float:
    """Seconds in which no stage of an iteration worked, hand-over between iterations included."""
    total = 0.0
    for iteration in iterations:
        (reached, _), stages = iteration.window, iteration.stages.values()
        for start, end in sorted((m.data["started_at"], m.data["finished_at"]) for m in stages):
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
