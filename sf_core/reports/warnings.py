"""Warnings that a run learns nothing, or much less or more slowly than it could. Each warning is one sentence
that names the setting to look at.

Warnings are read from manifests alone, so that the log, the summary, the page and `sf inspect` say the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.rollout_config import failures_text
from sf_core.reports.iterations import Iteration, failures_of, runners_of
from sf_core.reports.view import RunView

CUT_SHARE = 0.5
"""Smallest share of answers cut at their longest length that is a warning."""

FREE_SHARE = 0.5
AGENTS_SHARE = 0.5
"""The code of the agents is what a run waits for if engines had no request, and a runner computed, for at
least these shares of the time."""

NUM_CONSTANT = 3
"""Number of batches in a row with one reward for all sessions that is a warning."""


def failures_line(iteration: Iteration) -> str:
    """How many sessions failed since the batch before and why, as one line; empty if none did."""
    data = iteration.stages["rollout"].data
    counted = failures_of(iteration.stages["rollout"])
    parts = []
    if counted:
        parts.append(
            f"{sum(counted.values())} of {data['sessions']} sessions failed: {failures_text(counted)}"
        )
    if discarded := data.get("discarded"):
        parts.append(f"{sum(discarded.values())} failed sessions discarded: {failures_text(discarded)}")
    if parts and (error := data.get("last_error")):
        parts.append(f"last error: {error}")
    return "; ".join(parts)


def run_failures(view: RunView) -> list[str]:
    """How many training sessions and held-out sessions of a run failed and why, each as one line."""
    counted = {"failed sessions": view.failures, "failed held-out sessions": view.held_out_failures}
    return [f"{what}: {failures_text(failures)}" for what, failures in counted.items() if failures]


def iteration_warnings(view: RunView, number: int, config: RunConfig) -> dict[str, str]:
    """The warnings about a complete iteration, by kind."""
    return dict(_find_warnings(view, number, config))


def run_warnings(view: RunView) -> list[str]:
    """The merged warnings of all complete iterations."""
    return merge_warnings([iteration_warnings(view, i.number, view.config) for i in view.complete_iterations])


def merge_warnings(by_iteration: Collection[Mapping[str, str]]) -> list[str]:
    """The newest sentence of each kind, with the number of iterations that it is true of."""
    newest: dict[str, str] = {}
    for found in by_iteration:
        newest |= found
    counts = Counter(kind for found in by_iteration for kind in found)
    return [f"{newest[kind]} ({counts[kind]} of {len(by_iteration)} iterations)" for kind in newest]


def _find_warnings(view: RunView, number: int, config: RunConfig) -> Iterator[tuple[str, str]]:
    stages = view.iteration(number).stages
    rollout, filtered, trained = (stages[name].data for name in ("rollout", "filter", "train"))
    reward = config.environment.reward or "environment.reward"
    rewards_teach = config.train.advantage.kind != "none"
    is_equal = rewards_teach and filtered.get("zero_advantage_share") == 1.0
    if is_equal:
        yield (
            "equal",
            f"in every group all rewards were equal, so nothing was learned: {reward} does not distinguish "
            "the answers, or every task is too easy or too hard",
        )
    elif trained.get("grad_norm") == 0.0:
        yield (
            "gradient",
            ("the gradient was zero, so nothing was learned: check train.loss and train.advantage"),
        )
    share = rollout.get("cut_answers", 0) / max(1, rollout.get("answers", 0))
    if share >= CUT_SHARE:
        yield (
            "cut",
            f"{share:.0%} of the answers were cut off by rollout.max_tokens ({config.rollout.max_tokens}) "
            "or engine.context_length",
        )
    if refused := rollout.get("refused_reports"):
        yield (
            "reports",
            f"{refused} reports on sessions that had ended by another report were refused: check that only "
            "one program finishes each session",
        )
    if sentence := _agents_warning(rollout):
        yield "agents", sentence
    if rewards_teach and (earned := _find_constant(view, number)) is not None:
        yield (
            "constant",
            f"every session of the last {NUM_CONSTANT} batches earned {earned:g}: "
            f"check that {reward} is not constant",
        )


def _agents_warning(rollout: Mapping[str, Any]) -> str:
    """The warning that engines waited while the code of the agents computed; empty if they did not."""
    free = rollout.get("engines_free") or 0.0
    seconds = rollout.get("runners_seconds") or math.inf
    busy = {
        name: spent
        for name, spent in runners_of(rollout).items()
        if max(spent["busy_s"], spent["cpu_s"]) / seconds >= AGENTS_SHARE
    }
    if free < FREE_SHARE or not busy:
        return ""
    costs = ", ".join(
        f"{1000 * spent['cpu_s'] / max(1, spent['num_ended']):,.0f} ms on {name}"
        for name, spent in busy.items()
    )
    return (
        f"the engines had no request for {free:.0%} of the time, because the code of the agents computed "
        f"(CPU time per session: {costs}): use endpoint.client() instead of a new client in each session, "
        "look for what else each session loads, or add workers tagged agent"
    )


def _find_constant(view: RunView, number: int) -> float | None:
    """What every session of this batch and of those before it earned, if that is one number."""
    manifests = [view.manifest(n, "rollout") for n in range(number + 1 - NUM_CONSTANT, number + 1) if n >= 0]
    bounds = [
        manifest.data.get(name) for manifest in manifests if manifest for name in ("reward_min", "reward_max")
    ]
    is_one = len(bounds) == 2 * NUM_CONSTANT and None not in bounds and len(set(bounds)) == 1
    return bounds[0] if is_one else None
