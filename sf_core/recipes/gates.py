"""Gates by the names that `rollout.gate` gives them: which complete groups count. Pure.

A group that does not pass is dropped, and another one is sampled in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sf_core.recipes.rewards import are_equal


class Verdict(NamedTuple):
    keep: bool
    reason: str = ""
    """Why the group is dropped, as it is counted."""


KEEP = Verdict(True)

Gate = Callable[[Sequence[float]], Verdict]
"""Judges a group by the rewards of its sessions."""


def every(rewards: Sequence[float]) -> Verdict:
    """Keeps the group, whatever its rewards."""
    return KEEP


def varied(rewards: Sequence[float]) -> Verdict:
    """Drops a group of equal rewards, which teaches nothing (dynamic sampling; DAPO, Yu et al. 2025).

    >>> varied([1.0, 1.0])
    Verdict(keep=False, reason='equal_rewards')
    >>> varied([1.0, 0.0]).keep
    True
    """
    return Verdict(False, "equal_rewards") if are_equal(min(rewards), max(rewards)) else KEEP


GATES: dict[str, Gate] = {"all": every, "varied": varied}
