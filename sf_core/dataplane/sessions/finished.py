"""The result of a session that is over, kept until its rows are stored, and its form in a journal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np

from sf_core.config.failures import Status
from sf_core.dataplane.journal.journal import Record
from sf_core.dataplane.sessions.claims import Claim, claim_value, read_claim
from storage.schema import Trajectory, TurnSpan

_ARRAYS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "policy_versions": np.int32,
}


RESULT_BYTES, TRAJECTORY_BYTES, SPAN_BYTES = 600, 1000, 200
"""Measured memory of the objects, without tokens and texts."""


_turn_values = attrgetter(*(field.name for field in fields(TurnSpan)))


@dataclass(slots=True, eq=False)
class FinishedSession:
    """A session that is over and has its reward."""

    session_id: str
    claim: Claim | None
    """None for a session that no runner was given."""
    reward: float
    environment: str
    min_version: int | None
    max_version: int | None
    """Oldest and newest policy version of a sampled token."""
    trajectories: Sequence[Trajectory]
    status: Status = "finished"

    @property
    def num_bytes(self) -> int:
        return RESULT_BYTES + sum(map(_trajectory_bytes, self.trajectories))


def finished_record(session: FinishedSession) -> Record:
    return {
        "finished": session.claim and claim_value(session.claim),
        "session": session.session_id,
        "reward": session.reward,
        "environment": session.environment,
        "versions": [session.min_version, session.max_version],
        "status": session.status,
        "trajectories": [_trajectory_value(trajectory) for trajectory in session.trajectories],
    }


def read_finished(record: Record) -> FinishedSession:
    min_version, max_version = record["versions"]
    return FinishedSession(
        record["session"],
        record["finished"] and read_claim(record["finished"]),
        record["reward"],
        record["environment"],
        min_version,
        max_version,
        [_read_trajectory(value) for value in record["trajectories"]],
        record.get("status", "finished"),
    )


def _trajectory_bytes(trajectory: Trajectory) -> int:
    arrays = sum(getattr(trajectory, name).nbytes for name in _ARRAYS)
    objects = TRAJECTORY_BYTES + SPAN_BYTES * len(trajectory.turns)
    texts = sys.getsizeof(trajectory.messages) + sys.getsizeof(trajectory.tools)
    return int(arrays + objects + texts)


def _trajectory_value(trajectory: Trajectory) -> dict[str, Any]:
    value = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
    for name, dtype in _ARRAYS.items():
        value[name] = np.asarray(value[name], dtype=dtype).tobytes()
    value["turns"] = [_turn_values(turn) for turn in trajectory.turns]
    return value


def _read_trajectory(value: dict[str, Any]) -> Trajectory:
    arrays: dict[str, Any] = {n: np.frombuffer(value[n], dtype=dtype) for n, dtype in _ARRAYS.items()}
    return Trajectory(**value | arrays | {"turns": [TurnSpan(*turn) for turn in value["turns"]]})
