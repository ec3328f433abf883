"""A batch as advantages and weights see it, which are functions of it. Pure: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from sf_core.settings import Settings

Values = Sequence[npt.NDArray[np.float32]]
"""A number for each token of each row."""

Score = Literal["start", "entropy", "reference", "teacher", "values"]
"""What a network says of each sampled token. start: its log-prob under the weights at the beginning of the
train step; entropy: that of the distribution it was drawn from, in nats, under the same weights; reference:
its log-prob under the reference policy; teacher: that under `train.teacher`; values: the reward that the
critic expects before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """T answers of the policy, row by row and in each row from the first to the last. One that several rows
    hold is there for each of them."""

    rows: npt.NDArray[np.int64]
    """[T] number of each turn's row."""
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """[T] its tokens: start <= i < end of the row."""
    rewards: npt.NDArray[np.float64]
    """[T] what it earned by itself; 0 where nothing was said of it."""

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """[T] number of each turn in its row, from 0."""
        first = np.searchsorted(self.rows, self.rows)
        return np.arange(len(self.rows)) - first


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """S sessions in groups and their R rows (branches), with arrays per token."""

    rewards: npt.NDArray[np.float64]
    """[S]"""
    groups: npt.NDArray[np.int64]
    """[S] number of each session's group, from 0."""
    truncated: npt.NDArray[np.bool_]
    """[S] whether the budget of a turn or the context ended the session's last turn."""
    statuses: Sequence[str]
    """How each of S sessions ended (sf_core.config.failures.Status)."""
    sessions: npt.NDArray[np.int64]
    """[R] number of each row's session, from 0."""
    environments: Sequence[str]
    """Where each of S sessions has its task from."""
    masks: Sequence[npt.NDArray[np.bool_]]
    """Per row and token: whether it is trained."""
    versions: Sequence[npt.NDArray[np.int32]]
    """Per row and token: the policy version that sampled it."""
    logprobs: Values
    """The log-prob that was recorded when it was sampled; 0 where nothing was."""
    iteration: int
    """Version that the batch trains."""
    parents: npt.NDArray[np.int64]
    """[R] number of the row that each row forks from; -1 for none."""
    shared: npt.NDArray[np.int64]
    """[R] number of tokens that each row has from its parent."""
    turns: Turns
    scores: Mapping[Score, Values] = field(default_factory=dict)
    """Zeros where nothing is trained. There are none in the filter stage, and what a component `needs` in the
    train step."""

    @property
    def group_size(self) -> npt.NDArray[np.int64]:
        """[S] sessions in each session's group."""
        return np.bincount(self.groups)[self.groups].astype(np.int64)

    def group_sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[S] sum over each session's group. A session counts once, whatever its branches."""
        return np.bincount(self.groups, weights=values)[self.groups].astype(np.float64, copy=False)

    def group_mean(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[S] mean over each session's group."""
        return self.group_sum(values) / self.group_size

    def spread(self, values: npt.NDArray[np.float64]) -> Values:
        """Give every trained token the value [S] of its session, and the others 0."""
        of_rows = values[self.sessions]
        return [np.where(m, v, 0.0).astype(np.float32) for m, v in zip(self.masks, of_rows, strict=True)]

    def session_sum(self, values: Values) -> npt.NDArray[np.float64]:
        """[S] sum over the trained tokens of each session's rows."""
        pairs = zip(values, self.masks, strict=True)
        sums = [float(row[mask].sum(dtype=np.float64)) for row, mask in pairs]
        return np.bincount(self.sessions, sums, len(self.rewards)).astype(np.float64, copy=False)

    def select_trained(self, values: Values) -> npt.NDArray[np.float64]:
        """The values of all trained tokens of all rows, one behind the other."""
        parts = [row[mask] for row, mask in zip(values, self.masks, strict=True)]
        return np.concatenate(parts, dtype=np.float64) if parts else np.empty(0)


class Component(Settings):
    """A formula that a configuration names by its `kind`: its fields are its settings, and a call computes
    it."""

    @property
    def needs(self) -> frozenset[Score]:
        """Scores without which it cannot be computed."""
        return frozenset()
