"""What a group is to be, what came of it, and when a session was right. Rewards are equal up to rounding.
Values only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from sf_core.settings import Settings

RELATIVE = 1e-9
ABSOLUTE = 1e-9
"""Parts of a reward that add up to no more than 10^5 in magnitude give the same float64 sum within this, in
whatever order they are added. So small a difference is never meant."""


def are_equal(lowest: Any, highest: Any) -> Any:
    """Whether rewards differ by rounding only, from the lowest and the highest of them; floats or arrays [N].

    >>> are_equal(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1), are_equal(0.0, 1e-6)
    (True, False)
    """
    size = np.maximum(np.abs(lowest), np.abs(highest))
    equal = np.subtract(highest, lowest) <= ABSOLUTE + RELATIVE * size
    return equal if np.ndim(equal) else bool(equal)


SAME = 1e-6
"""Maximum difference of two rewards that count as equal, because float32 rounds rewards."""


class Success(Settings):
    """A session is right if its reward is at least `at_least`. If `part` is set, the named part of the reward
    is compared instead."""

    part: str | None = Field(None, min_length=1)
    """Name of the part of the reward that is compared with `at_least`. A session whose reward lacks this part
    fails. Empty: the whole reward is compared."""
    at_least: float = Field(1.0, ge=-1e9, le=1e9)
    """Minimum reward, or minimum value of `part`, for a session to count as right."""

    def is_right(self, score: float) -> bool:
        return score >= self.at_least - SAME


class TaskRef(NamedTuple):
    """A training task, identified by its source and its number."""

    source: str
    """Name of the environment's part that contains the task. Empty: the environment has no parts, or the
    parts take turns."""
    number: int
    """Index of the task among the training tasks of the source."""


class Pick(NamedTuple):
    """The task of a group and its number of sessions."""

    task: TaskRef
    position: int
    """Position in the order of the source's tasks at which the next pick starts."""
    need: int
    """Number of sessions that complete the group."""
    size: int
    """Number of sessions that start. When the group is complete, sessions that still run are stopped."""


class Result(NamedTuple):
    """A finished session that counts for its group."""

    reward: float
    score: float
    """Value that `rollout.success` compares: the reward of the session, or a named part of the reward. 0 if
    the session failed."""
    tokens: int
    """Number of sampled tokens in the session's rows."""
    status: str
    """Status with which the session ended (sf_core.config.rollout_config.Status)."""
    task_id: str = ""


class Outcome(NamedTuple):
    """A group that has left the rollout manager, because it was put into a batch or dropped."""

    group: int
    pick: Pick | None
    """Task of the group and number of its sessions. None if external agents ran the group."""
    size: int
    version: int
    """Version of the policy when the group started."""
    results: tuple[Result, ...]
    """Results of the sessions that counted, ordered by the place of the session in the group. A dropped group
    may have fewer results than the number of sessions that completes it."""
    verdict: str
    """`sealed` for a group in a batch. For a dropped group: the reason why the group was dropped."""


SEALED = "sealed"
