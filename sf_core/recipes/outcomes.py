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
    """Minimum value for a session to be right."""

    def is_right(self, score: float) -> bool:
        return score >= self.at_least - SAME


class TaskRef(NamedTuple):
    """A training task, which the environment makes from these two."""

    source: str
    """Part of the environment that has the task; empty if its parts are dealt in turn, or it has none."""
    number: int
    """Its place among the training tasks of the source."""


class Pick(NamedTuple):
    """The task of a group and its number of sessions."""

    task: TaskRef
    position: int
    """Place in the order of the source from which the next pick continues."""
    need: int
    """Sessions with which the group is complete."""
    size: int
    """Sessions that are begun. Those left when the group is complete are ended."""


class Result(NamedTuple):
    """One session of a group that has ended and counts."""

    reward: float
    score: float
    """What `rollout.success` compares: the reward, or the named part of it; 0 if the session failed."""
    tokens: int
    """Sampled tokens of its rows."""
    status: str
    """How it ended (sf_core.config.failures.Status)."""
    task_id: str = ""


class Outcome(NamedTuple):
    """A group that has left the rollout manager: a batch took it, or it was dropped."""

    group: int
    pick: Pick | None
    """None for a group from outside."""
    size: int
    version: int
    """Policy version when the group was begun."""
    results: tuple[Result, ...]
    """Results of the sessions that counted, in order of their places. A dropped group may have fewer than it
    needed."""
    verdict: str
    """`sealed`, or why the group was dropped."""


SEALED = "sealed"
