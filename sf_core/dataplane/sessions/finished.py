"""The result of a session that is over, kept until its rows are stored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sf_core.config.failures import Status
from sf_core.dataplane.sessions.claims import Claim
from storage.schema import Trajectory

RESULT_BYTES, TRAJECTORY_BYTES, SPAN_BYTES = 600, 1000, 200
"""Measured memory of the objects, without tokens and texts."""

TOKEN_BYTES = 4 + 1 + 4 + 4
"""Memory of a token's id, mask, log-prob and version."""


@dataclass(slots=True, eq=False)
class FinishedSession:
    """A session that is over and has its reward."""

    session_id: str
    claim: Claim | None
    """None for a session that is of no group."""
    reward: float
    environment: str
    min_version: int | None
    max_version: int | None
    """Oldest and newest policy version of a sampled token."""
    trajectories: Sequence[Trajectory]
    status: Status = "finished"
    error: str = ""
    """Why it failed, if it did."""

    @property
    def num_bytes(self) -> int:
        return RESULT_BYTES + sum(map(_trajectory_bytes, self.trajectories))


def _trajectory_bytes(trajectory: Trajectory) -> int:
    arrays = TOKEN_BYTES * len(trajectory.token_ids)
    objects = TRAJECTORY_BYTES + SPAN_BYTES * len(trajectory.turns)
    texts = sum(map(sys.getsizeof, (trajectory.messages, trajectory.tools, trajectory.output)))
    return arrays + objects + texts
