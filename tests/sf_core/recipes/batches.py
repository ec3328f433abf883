"""Samples without a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sf_core.recipes.samples import Samples, Turns


def samples(rewards: Sequence[float], groups: Sequence[int], **changes: Any) -> Samples:
    """Sessions of one row with two trained tokens after one of the prompt."""
    size = len(rewards)
    known = {
        "rewards": np.array(rewards, np.float64),
        "groups": np.unique(groups, return_inverse=True)[1],
        "truncated": np.zeros(size, np.bool_),
        "statuses": ["finished"] * size,
        "sessions": np.arange(size),
        "masks": [np.array([False, True, True])] * size,
        "versions": [np.array([-1, 0, 0], np.int32)] * size,
        "iteration": 0,
        "environments": ["test"] * size,
        "logprobs": [np.array([0, -1, -1], np.float32)] * size,
        "parents": np.full(size, -1),
        "shared": np.zeros(size, np.int64),
        "turns": turns(),
    }
    return Samples(**known | changes)  # type: ignore[arg-type]


def turns(*of: tuple[int, int, int, float]) -> Turns:
    """Row, start, end and reward of each."""
    rows, starts, ends, rewards = np.array(of, np.float64).reshape(-1, 4).T
    return Turns(rows.astype(np.int64), starts.astype(np.int64), ends.astype(np.int64), rewards)


def of_sessions(values: Any) -> np.ndarray:
    """The value of each row's trained tokens, which must agree."""
    assert all(row[0] == 0 and row[1] == row[2] for row in values)
    return np.array([row[1] for row in values])
