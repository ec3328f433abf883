"""What the journal holds of a run, as MessagePack values and back.

A record is a map whose first key is its kind. Records of turns are in turn_records.py; what records do to a
run is in recovery.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from sf_core.config.failures import Reason, Status
from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.journal.journal import Record, kind_of
from sf_core.dataplane.runs.groups import Claim, Place
from sf_core.dataplane.runs.rollout_manager import Batch
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef
from storage.schema import Trajectory, TurnSpan

_ARRAYS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "policy_versions": np.int32,
}
RESULT_BYTES, TRAJECTORY_BYTES, SPAN_BYTES = 600, 1000, 200
"""Memory that objects take beside tokens and texts, as measured."""

_turn_values = attrgetter(*(field.name for field in fields(TurnSpan)))


@dataclass(slots=True, eq=False)
class FinishedSession:
    """A session that is over and has its reward. memory.py holds it until its rows are stored."""

    session_id: str
    claim: Claim | None
    """None if no runner was given it."""
    reward: float
    environment: str
    min_version: int | None
    max_version: int | None
    """Oldest and newest policy version of a sampled token."""
    trajectories: Sequence[Trajectory]
    """Empty while they are on disk."""
    status: Status = "finished"

    is_idle = True

    @property
    def label(self) -> str:
        return f"finished session {self.session_id}"

    @property
    def num_bytes(self) -> int:
        return RESULT_BYTES + sum(map(_trajectory_bytes, self.trajectories))

    def records(self) -> Iterator[Record]:
        return iter([finished_record(self)])

    def drop(self) -> None:
        self.trajectories = []

    def take_back(self, records: Iterable[Record]) -> None:
        [record] = records
        self.trajectories = read_finished(record).trajectories


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


def run_record(spec: RunSpec, num_gateways: int = 1) -> Record:
    """A flow registered the run; the first record of every journal. With more than one gateway process the
    turns are in journals of their own."""
    record = {"run": spec.model_dump() | {"key": spec.agents_key}}
    return record if num_gateways == 1 else record | {"gateways": num_gateways}


def gateways_of(record: Record) -> int:
    """How many processes recorded the turns of the run, from this record of its registration on."""
    return int(record.get("gateways", 1))


def weights_record(weights: WeightsRef) -> Record:
    return {"weights": [weights.version, weights.uri]}


def evaluation_record(version: int, num_tasks: int) -> Record:
    return {"evaluation": [version, num_tasks]}


def sealed_record(index: int, batch: Batch, answer: dict[str, Any]) -> Record:
    return {"sealed": index, "batch": asdict(batch), "answer": answer}


def revoked_record(lease_id: str) -> Record:
    return {"revoked": lease_id}


def paused_record(engine_id: str | None) -> Record:
    """Of one engine, or of the run."""
    return {"paused": engine_id}


def resumed_record(engine_id: str | None) -> Record:
    return {"resumed": engine_id}


def released_record() -> Record:
    return {"released": True}


_SESSION_FACTS = ["runner", "started_at", "group", "task_id", "environment", "metadata"]


def opened_record(sessions: list[Session]) -> Record:
    return {"opened": [_session_value(session) for session in sessions]}


def read_opened(record: Record) -> list[Session]:
    return [
        Session(session_id, claim and read_claim(claim), **dict(zip(_SESSION_FACTS, facts, strict=True)))
        for session_id, claim, *facts in record["opened"]
    ]


def _session_value(session: Session) -> list[Any]:
    claim = session.claim and claim_value(session.claim)
    return [session.session_id, claim, *(getattr(session, name) for name in _SESSION_FACTS)]


def rewarded_record(session: Session) -> Record:
    """Of a session that goes on."""
    return {"rewarded": session.session_id, "reward": session.reward, "parts": session.reward_parts}


def named_record(session: Session) -> Record:
    """Of a session that goes on: what it works on."""
    return {"named": session.session_id, "task_id": session.task_id, "environment": session.environment}


def answered_record(session: Session) -> Record:
    """Of a session whose agent is through; what it answered is to be scored."""
    return {"answered": session.session_id, "answer": session.answer}


def closed_record(session: Session) -> Record:
    """The end of a session that was no runner's and leaves nothing."""
    return {"closed": session.session_id}


def stored_record(session_ids: list[str]) -> Record:
    """The rows of finished sessions that were no runner's are in the run directory."""
    return {"stored": session_ids}


def lost_record(claim: Claim) -> Record:
    """The session's runner is gone; its place is open again."""
    return {"lost": claim_value(claim)}


def failed_record(claim: Claim, reason: Reason) -> Record:
    return {"failed": claim_value(claim), "reason": reason}


def rejected_record(index: int, reason: str) -> Record:
    return {"rejected": [index, reason]}


def claim_value(claim: Claim) -> list[Any]:
    return [*claim.place, claim.attempt, claim.draw]


def read_claim(value: list[Any]) -> Claim:
    # in journals of earlier versions no claim has a number of its draw
    split, group, member, attempt, *draw = value
    return Claim(Place(split, group, member), attempt, *draw)


def places(record: Record) -> set[tuple[Literal["train", "holdout"], int]]:
    """(split, group) of every claim and group that a record is about."""
    match kind_of(record):
        case "rejected":
            return {("train", record["rejected"][0])}
        case "opened":
            return {(claim[0], claim[1]) for _, claim, *_ in record["opened"] if claim is not None}
        case "finished" | "failed" | "lost" as kind:
            return {(record[kind][0], record[kind][1])}
    return set()


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
