"""A batch as advantages and weights see it, which are functions of it. Pure: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from sf_core.settings import Settings

Values = Sequence[npt.NDArray[np.float32]]
"""One array per row, with a number for each token of the row."""

Score = Literal["start", "entropy", "reference", "teacher", "values"]
"""Kinds of scores that a network computes for each sampled token. start: log-prob under the weights at the
start of the train step. entropy: entropy of the sampling distribution under the same weights, in nats.
reference: log-prob under the reference policy. teacher: log-prob under `train.teacher`. values: reward that
the critic predicts before the token."""


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """T turns of the policy, ordered by row and by position in the row. A turn that several rows share is
    listed once for each row."""

    rows: npt.NDArray[np.int64]
    """[T] number of the row that contains the turn."""
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """[T] end of the turn in its row: the tokens of the turn are start <= i < end."""
    rewards: npt.NDArray[np.float64]
    """[T] reward of the turn itself; 0 if the reward function gave the turn no reward."""

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """[T] number of each turn in its row, from 0."""
        first = np.searchsorted(self.rows, self.rows)
        return np.arange(len(self.rows)) - first


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A batch: S sessions in groups, the R rows (branches) of the sessions, and arrays with one value per
    token."""

    rewards: npt.NDArray[np.float64]
    """[S] reward of each session."""
    groups: npt.NDArray[np.int64]
    """[S] number of the group of each session, from 0."""
    truncated: npt.NDArray[np.bool_]
    """[S] True if the last turn of the session was cut off by the token limit or by the context length."""
    statuses: Sequence[str]
    """[S] status with which each session ended (sf_core.config.rollout_config.Status)."""
    sessions: npt.NDArray[np.int64]
    """[R] number of the session of each row, from 0."""
    environments: Sequence[str]
    """[S] name of the environment of each session's task."""
    masks: Sequence[npt.NDArray[np.bool_]]
    """One array per row, with one value per token: True if the token is trained."""
    versions: Sequence[npt.NDArray[np.int32]]
    """One array per row, with one value per token: the policy version that sampled the token."""
    logprobs: Values
    """One array per row, with one value per token: the log-prob recorded when the token was sampled, or 0 if
    the policy did not sample the token."""
    iteration: int
    """Version of the policy that is trained on the batch."""
    parents: npt.NDArray[np.int64]
    """[R] number of the row from which each row branches; -1 if the row is not a branch of another row."""
    shared: npt.NDArray[np.int64]
    """[R] number of tokens that each row shares with its parent row."""
    turns: Turns
    scores: Mapping[Score, Values] = field(default_factory=dict)
    """Scores that the component `needs`: one array per row, with one value per token; 0 for tokens that are
    not trained. Empty in the filter stage."""

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
        row_sums = [
            float(row[mask].sum(dtype=np.float64)) for row, mask in zip(values, self.masks, strict=True)
        ]
        sums = np.bincount(self.sessions, weights=row_sums, minlength=len(self.rewards))
        return sums.astype(np.float64, copy=False)

    def select_trained(self, values: Values) -> npt.NDArray[np.float64]:
        """The values of all trained tokens of all rows, one behind the other."""
        parts = [row[mask] for row, mask in zip(values, self.masks, strict=True)]
        return np.concatenate(parts, dtype=np.float64) if parts else np.empty(0)


class Component(Settings):
    """A formula that a configuration names by its `kind`. The fields of the class are the settings of the
    formula, and calling an instance computes the formula."""

    @property
    def needs(self) -> frozenset[Score]:
        """Scores without which it cannot be computed."""
        return frozenset()
