"""Gates: which complete groups count. What `rollout.gate` names. Pure.

A group that does not pass is dropped, and another one is sampled in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field

from sf_core.recipes.outcomes import SAME, Result, Success
from sf_core.settings import Settings, or_kind


class All(Settings):
    """Every complete group enters the batch."""

    kind: Literal["all"] = "all"

    def refusal(self, results: Sequence[Result], success: Success | None) -> str:
        """Why a group is dropped, in one word as it is counted; empty if it counts."""
        return ""


class Varied(Settings):
    """Drops groups in which all rewards are equal, because such groups do not change the policy (dynamic
    sampling; DAPO, Yu et al. 2025, eq. 11). If `rollout.success` is set, this gate instead drops groups in
    which all sessions are right, or all are wrong."""

    kind: Literal["varied"] = "varied"

    def refusal(self, results: Sequence[Result], success: Success | None) -> str:
        if success is not None:
            return "" if num_right(results, success) in range(1, len(results)) else "one_outcome"
        rewards = [result.reward for result in results]
        return "" if rewards and max(rewards) - min(rewards) > SAME else "equal_rewards"


class Mixed(Settings):
    """Drops groups with fewer than `least` right sessions, and groups with fewer than `least` wrong
    sessions."""

    kind: Literal["mixed"] = "mixed"
    least: int = Field(1, ge=1)
    """Minimum number of right sessions in a group, and minimum number of wrong sessions in a group. 1: drops
    groups in which all sessions are right or all are wrong. 2: also drops groups in which only one session
    differs from the others, perhaps because of a noisy reward."""

    def refusal(self, results: Sequence[Result], success: Success | None) -> str:
        right = num_right(results, success or Success())
        return "" if self.least <= right <= len(results) - self.least else "not_mixed"


GATE_REASONS = ("equal_rewards", "one_outcome", "not_mixed")
"""Reasons with which gates drop groups."""


def num_right(results: Sequence[Result], success: Success) -> int:
    return sum(success.is_right(result.score) for result in results)


Kind = Literal["right", "mixed", "wrong"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of groups: all sessions right, some sessions right, no session right."""


def kind_of(results: Sequence[Result], success: Success) -> Kind:
    right = num_right(results, success)
    if right == 0:
        return "wrong"
    return "mixed" if right < len(results) else "right"


AnyGate = Annotated[All | Varied | Mixed, Field(discriminator="kind"), or_kind("all")]
