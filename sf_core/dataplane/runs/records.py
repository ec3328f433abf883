"""Records of a run in its journal, made and read as MessagePack values.

A record's first key is its kind. Records of turns are in turn_records.py, effects on a run in effects.py.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from sf_core.config.failures import Reason
from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.journal.journal import Record, kind_of
from sf_core.dataplane.runs.rollout_manager import Batch
from sf_core.dataplane.sessions.claims import Claim, claim_value, read_claim
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef


def run_record(spec: RunSpec, num_gateways: int = 1) -> Record:
    """A flow registered the run; the first record of every journal. With more than one gateway process, the
    turns are in separate journals."""
    record = {"run": spec.model_dump() | {"key": spec.agents_key}}
    return record if num_gateways == 1 else record | {"gateways": num_gateways}


def gateways_of(record: Record) -> int:
    """Number of processes that record the turns of the run from this registration on."""
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
    """One engine was paused, or the run (None)."""
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
    """A reward was reported for a session that stays open."""
    return {"rewarded": session.session_id, "reward": session.reward, "parts": session.reward_parts}


def named_record(session: Session) -> Record:
    """The runner named the task of a session that stays open."""
    return {"named": session.session_id, "task_id": session.task_id, "environment": session.environment}


def answered_record(session: Session) -> Record:
    """The agent of a session is done, and its answer is to be scored."""
    return {"answered": session.session_id, "answer": session.answer}


def closed_record(session: Session) -> Record:
    """An external session ended without a result."""
    return {"closed": session.session_id}


def stored_record(session_ids: list[str]) -> Record:
    """The rows of finished external sessions are in the run directory."""
    return {"stored": session_ids}


def lost_record(claim: Claim) -> Record:
    """The session's runner is gone; its place is open again."""
    return {"lost": claim_value(claim)}


def failed_record(claim: Claim, reason: Reason) -> Record:
    return {"failed": claim_value(claim), "reason": reason}


def rejected_record(index: int, reason: str) -> Record:
    return {"rejected": [index, reason]}


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
