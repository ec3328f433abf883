"""Metrics of a train step, from those of every token on each rank."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sf_core.recipes.losses import Kl, PolicyLoss, Tokens
from sf_core.recipes.samples import Score, Values
from sf_core.training.packing.rows import Row
from storage.tables.trajectories import first_rows

MEANS = {
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "clipped": "clip_fraction",
    "clipped_low": "clip_fraction_low",
    "clipped_high": "clip_fraction_high",
    "ratio": "ratio_mean",
    "ratio_square": "ratio_second_moment",
    "kl_reference": "kl_reference",
    "teacher_kl": "teacher_kl",
    "value_loss": "value_loss",
    "logprob_difference": "logprob_difference_mean",
    "engine_difference": "engine_difference_mean",
    "lag": "lag_mean",
}
MAXIMA = {
    "ratio": "ratio_max",
    "logprob_difference": "logprob_difference_max",
    "engine_difference": "engine_difference_max",
    "lag": "lag_max",
}

MAX_PARTS = 16
"""Most parts of rewards that have a metric of their own."""

_UNWELCOME = re.compile(r"[^\w. /-]")
"""Characters that trackers refuse in the name of a metric."""

OPTIONAL = {"kl_reference", "teacher_kl", "value_loss"}
"""Metrics that some steps do not have."""


@torch.no_grad()
def divergence(
    tokens: Tokens, policy_loss: PolicyLoss, behaviour: torch.Tensor, reference: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far the policy is from the one that sampled, whose log-probs [M] are `behaviour`, and from the
    reference, per token; `reference` is NaN without one.

    `kl` is the k3 estimator of KL(behaviour || policy) (Schulman 2020): unbiased and never negative.
    `clipped` marks tokens that the loss keeps from going further."""
    ratio = replace(tokens, old=behaviour).ratio
    low, high = policy_loss.find_bounded(tokens)
    metrics = {
        "ratio": ratio,
        "ratio_square": ratio.square(),
        "logprob_difference": (tokens.logprobs - behaviour).abs(),
        "kl": ratio - 1.0 - ratio.log(),
        "clipped": (low | high).float(),
        "clipped_low": low.float(),
        "clipped_high": high.float(),
    }
    if not reference.isnan().any():
        metrics["kl_reference"] = Kl(coefficient=1.0)(tokens.logprobs, reference)
    return metrics


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of one metric over the tokens of one rank."""

    count: int
    mean: float
    maximum: float


def summaries(per_token: dict[str, torch.Tensor]) -> dict[str, Summary]:
    return {
        name: Summary(values.numel(), float(values.mean()), float(values.max()))
        for name, values in per_token.items()
        if values.numel()
    }


def token_metrics(of_ranks: list[dict[str, Summary]]) -> dict[str, float]:
    """Means over the trained tokens of all ranks, and maxima where these matter; NaN over none."""
    parts = {name: [summaries[name] for summaries in of_ranks if name in summaries] for name in MEANS}
    metrics: dict[str, float] = {}
    for name, label in MEANS.items():
        if parts[name] or name not in OPTIONAL:
            metrics[label] = _mean(parts[name])
    for name, label in MAXIMA.items():
        metrics[label] = max((part.maximum for part in parts[name]), default=math.nan)
    compared = sum(part.count for part in parts["engine_difference"])
    metrics["engine_difference_tokens"] = float(compared)
    return metrics


def _mean(parts: list[Summary]) -> float:
    if len(parts) == 1:
        return parts[0].mean
    tokens = sum(part.count for part in parts)
    return sum(part.mean * part.count for part in parts) / tokens if tokens else math.nan


def teacher_metrics(rows: Sequence[Row], scores: Mapping[Score, Values]) -> dict[str, float]:
    """The divergence KL(policy || teacher) as the sampled tokens estimate it, if there are scores of one."""
    if "teacher" not in scores:
        return {}
    of_rows = []
    for row, start, teacher in zip(rows, scores["start"], scores["teacher"], strict=True):
        of_rows.append((start - teacher)[row.loss_mask])
    gaps = np.concatenate(of_rows)
    return {"teacher_kl": float(gaps.mean(dtype=np.float64)) if gaps.size else math.nan}


def batch_metrics(batch: pa.Table, rows: list[Row]) -> dict[str, float]:
    """Metrics of a batch; rewards and advantages count once per session, whatever its branches."""
    sampled = np.array([row.loss_mask.sum() for row in rows])
    first = first_rows(batch["session_id"])
    rewards: Any = batch["reward"].to_numpy()[first]
    teaching = [row for row in rows if row.advantages.any()]
    sessions = {row.session for row in rows}
    taught_sessions = {row.session for row in teaching}
    groups = {row.group for row in rows}
    taught_groups = {row.group for row in teaching}
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **_reward_parts(batch["reward_parts"].take(pa.array(first))),
        "length_mean": float(np.mean([row.token_ids.size for row in rows])),
        "length_max": float(max(row.token_ids.size for row in rows)),
        "sampled_mean": float(sampled.mean()),
        "sampled_max": float(sampled.max()),
        "tokens": float(sampled.sum()),
        "rows": float(len(rows)),
        "zero_advantage_share": len(sessions - taught_sessions) / len(sessions),
        "zero_signal_groups": len(groups - taught_groups) / len(groups),
    }


def _reward_parts(parts: pa.ChunkedArray) -> dict[str, float]:
    """Mean of each part of the rewards over the sessions that have it; of the most frequent ones."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for session in parts.to_pylist():
        for part in session:
            by_name[part["name"]].append(part["value"])
    frequent = sorted(by_name, key=lambda name: (-len(by_name[name]), name))[:MAX_PARTS]
    return {f"reward.{_UNWELCOME.sub('_', name)}": float(np.mean(by_name[name])) for name in frequent}
