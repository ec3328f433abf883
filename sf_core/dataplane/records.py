"""What the journal holds of a run, as MessagePack values and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np

from sf_core.dataplane.groups import Claim, Place
from sf_core.dataplane.journal import Record
from storage.schema import Trajectory, TurnSpan

_ARRAYS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "policy_versions": np.int32,
}
_turn_values = attrgetter(*(field.name for field in fields(TurnSpan)))


@dataclass(frozen=True, slots=True, eq=False)
class FinishedSession:
    """A session that is over and has its reward."""

    claim: Claim
    reward: float
    environment: str
    min_version: int | None
    trajectories: Sequence[Trajectory]


def finished_record(session: FinishedSession) -> Record:
    return {
        "finished": claim_value(session.claim),
        "reward": session.reward,
        "environment": session.environment,
        "min_version": session.min_version,
        "trajectories": [_trajectory_value(trajectory) for trajectory in session.trajectories],
    }


def read_finished(record: Record) -> FinishedSession:
    return FinishedSession(
        read_claim(record["finished"]),
        record["reward"],
        record["environment"],
        record["min_version"],
        [_read_trajectory(value) for value in record["trajectories"]],
    )


def claimed_record(claims: list[Claim]) -> Record:
    return {"claimed": [claim_value(claim) for claim in claims]}


def rejected_record(index: int, reason: str) -> Record:
    return {"rejected": [index, reason]}


def claim_value(claim: Claim) -> list[Any]:
    return [*claim.place, claim.attempt]


def read_claim(value: list[Any]) -> Claim:
    split, group, member, attempt = value
    return Claim(Place(split, group, member), attempt)


def places(record: Record) -> set[tuple[str, int]]:
    """(split, group) of everything a record is about."""
    if "rejected" in record:
        return {("train", record["rejected"][0])}
    claims = record["claimed"] if "claimed" in record else [record["finished"]]
    return {(split, group) for split, group, _, _ in claims}


def _trajectory_value(trajectory: Trajectory) -> dict[str, Any]:
    value = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
    for name, dtype in _ARRAYS.items():
        value[name] = np.asarray(value[name], dtype=dtype).tobytes()
    value["turns"] = [_turn_values(turn) for turn in trajectory.turns]
    return value


def _read_trajectory(value: dict[str, Any]) -> Trajectory:
    arrays: dict[str, Any] = {n: np.frombuffer(value[n], dtype=dtype) for n, dtype in _ARRAYS.items()}
    return Trajectory(**value | arrays | {"turns": [TurnSpan(*turn) for turn in value["turns"]]})
