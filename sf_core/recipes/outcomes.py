"""What a group is to be, what came of it, and when a session was right. Values only."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from sf_core.settings import Settings

SAME = 1e-6
"""Rewards that differ by no more are equal: float32 rounding makes no difference."""


class Success(Settings):
    """A session is right if its reward, or one named part of the reward, is at least `at_least`."""

    part: str | None = Field(None, min_length=1)
    """Name of the part of the reward to compare. If the reward of a session lacks this part, the session
    fails. Empty: compare the reward itself."""
    at_least: float = Field(1.0, ge=-1e9, le=1e9)
    """Minimum reward, or minimum value of `part`, for a session to count as right."""

    def is_right(self, score: float) -> bool:
        return score >= self.at_least - SAME


class TaskRef(NamedTuple):
    """A training task, identified by source and number."""

    source: str
    """Part of the environment that has the task. Empty: the environment has no parts, or its parts take
    turns."""
    number: int
    """Place of the task among the training tasks of the source."""


class Pick(NamedTuple):
    """The task of a group and its number of sessions."""

    task: TaskRef
    position: int
    """Place in the order of the source from which the next pick continues."""
    need: int
    """Number of sessions that complete the group."""
    size: int
    """Number of sessions that are started. Sessions still running when the group is complete are stopped."""


class Result(NamedTuple):
    """A finished session of a group that counts."""

    reward: float
    score: float
    """Value that `rollout.success` compares: the reward, or a named part of the reward. 0 if the session
    failed."""
    tokens: int
    """Number of sampled tokens in the session's rows."""
    status: str
    """Status with which the session ended (sf_core.config.failures.Status)."""
    task_id: str = ""


class Outcome(NamedTuple):
    """A group that has left the rollout manager: in a batch, or dropped."""

    group: int
    pick: Pick | None
    """Task and number of sessions. None for a group from outside."""
    size: int
    version: int
    """Policy version when the group started."""
    results: tuple[Result, ...]
    """Results of the sessions that counted, in order of their places in the group. A dropped group may have
    fewer results than it needed."""
    verdict: str
    """`sealed` for a group in a batch, otherwise the reason why the group was dropped."""


SEALED = "sealed"
