"""The rollout of a run, and results of its sessions."""

from __future__ import annotations

from typing import Any

from benchmarks.simulation.rollout import Rollout
from sf_core.config import RolloutConfig
from sf_core.dataplane.sessions.claims import Claim
from sf_core.recipes.outcomes import Result

RULES = RolloutConfig(group_size=2, groups_per_batch=2, session_attempts=2)


def manager(lag_bound: int = 1, num_batches: int = 100, **changes: Any) -> Rollout:
    return Rollout(RULES.model_copy(update=changes), lag_bound, num_batches)


def begun_as(manager_before: Rollout, **changes: Any) -> Rollout:
    """A manager in which the groups of another one have begun, as after a restart."""
    again = manager(**changes)
    for group in manager_before.groups.values():
        if group.pick is not None:
            again.begin(group.index, group.pick, group.version)
    return again


def got(reward: float) -> Result:
    return Result(reward, reward, 1, "finished")


def finish_all(manager: Rollout, claims: list[Claim], version: int = 0, reward: float = 1.0) -> None:
    for claim in claims:
        manager.note_started(claim, version)
        manager.end(claim, got(reward), version)
