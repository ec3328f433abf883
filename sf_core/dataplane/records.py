"""What the journal holds of a run, as MessagePack values and back.

A record is a map whose first key is its kind. Turns are deltas: a prompt names the turn it extends, a turn's
record holds the tokens that no chunk before it held. What records do to a run is in recovery.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson

from sf_core.dataplane.generation import Generation
from sf_core.dataplane.groups import Claim, Place
from sf_core.dataplane.journal import Record
from sf_core.dataplane.rollout_manager import Batch
from sf_core.dataplane.session import Prompt, Session, Turn
from sf_core.dataplane.specs import RunSpec
from sf_core.types import Chunk, FinishReason, Sampling, WeightsRef
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


def run_record(spec: RunSpec) -> Record:
    """A flow registered the run; the first record of every journal."""
    return {"run": spec.model_dump()}


def weights_record(weights: WeightsRef) -> Record:
    return {"weights": [weights.version, weights.uri]}


def evaluation_record(version: int, num_tasks: int) -> Record:
    return {"evaluation": [version, num_tasks]}


def sealed_record(index: int, batch: Batch, answer: dict[str, Any]) -> Record:
    return {"sealed": index, "batch": asdict(batch), "answer": answer}


def revoked_record(lease_id: str) -> Record:
    return {"revoked": lease_id}


def released_record() -> Record:
    return {"released": True}


def opened_record(sessions: list[Session]) -> Record:
    return {
        "opened": [
            [
                session.session_id,
                session.claim and claim_value(session.claim),
                session.runner,
                session.started_at,
            ]
            for session in sessions
        ]
    }


def read_opened(record: Record) -> list[Session]:
    return [
        Session(session_id, claim and read_claim(claim), runner=runner, started_at=started_at)
        for session_id, claim, runner, started_at in record["opened"]
    ]


def lost_record(claim: Claim) -> Record:
    """The session's runner is gone; its place is open again."""
    return {"lost": claim_value(claim)}


def failed_record(claim: Claim) -> Record:
    return {"failed": claim_value(claim)}


def rejected_record(index: int, reason: str) -> Record:
    return {"rejected": [index, reason]}


class TurnKey(NamedTuple):
    """A turn among all of its run, from its beginning on."""

    session_id: str
    prompt: int
    """Index of its prompt."""
    sample: int


def begun_record(key: TurnKey, digest: bytes, idempotency_key: str | None, prompt: Prompt) -> Record:
    """A turn was begun. Its prompt is in the record of the first turn begun from it."""
    record: Record = {"begun": [*key, digest, idempotency_key]}
    return record | {"prompt": _prompt_value(prompt)} if key.sample == 0 else record


def chunk_record(key: TurnKey, tokens: Tokens, engine: str) -> Record:
    return {"chunk": [*key, *tokens.value(), engine]}


def turn_record(key: TurnKey, turn: Turn, num_recorded: int) -> Record:
    """The end of a turn; its first tokens are in chunks already."""
    tail = Tokens(turn.ids, turn.logprobs, turn.versions).since(num_recorded)
    facts = [getattr(turn, name) for name in _TURN_FACTS]
    sampling = turn.sampling
    sampled_how = [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed]
    return {
        "turn": [*key, *tail.value(), orjson.dumps(turn.message), turn.finish_reason, sampled_how, *facts]
    }


def delivered_record(key: TurnKey) -> Record:
    """The agent has its answer, as far as can be seen from here."""
    return {"delivered": list(key)}


class Tokens(NamedTuple):
    """Sampled tokens in order: int32 ids, float32 log-probs, int32 policy versions."""

    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray

    def since(self, start: int) -> Tokens:
        return Tokens(self.ids[start:], self.logprobs[start:], self.versions[start:])

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else NO_TOKENS

    def value(self) -> list[bytes]:
        return [array.tobytes() for array in self]

    @classmethod
    def of(
        cls, ids: bytes | array[Any], logprobs: bytes | array[Any], versions: bytes | array[Any]
    ) -> Tokens:
        return cls(
            np.frombuffer(ids, dtype=np.int32),
            np.frombuffer(logprobs, dtype=np.float32),
            np.frombuffer(versions, dtype=np.int32),
        )


NO_TOKENS = Tokens.of(b"", b"", b"")


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """A turn that was begun before a restart, as far as its records go."""

    key: TurnKey
    digest: bytes
    """Of the request body."""
    idempotency_key: str | None
    prompt: Prompt
    tokens: Tokens = NO_TOKENS
    engines: str = ""
    turn: Turn | None = None
    """Once it is finished."""
    delivered: bool = False

    def restore(self, generation: Generation) -> None:
        """Bring a new generation of the same request to where this turn was."""
        ids, logprobs, versions = self.tokens
        edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(ids)] if len(ids) else []
        for start, end in pairwise(edges):
            chunk = ids[start:end].tolist(), logprobs[start:end].tolist(), int(versions[start])
            generation.absorb(Chunk(generation.request_id, *chunk), "")
        generation.engines = self.engines.split(",") if self.engines else []
        if self.turn is not None:
            generation.interruptions = self.turn.interruptions
            generation.finish_reason = self.turn.finish_reason
        elif len(ids) and int(ids[-1]) in generation.stop_token_ids:
            generation.finish_reason = FinishReason.STOP
        elif len(ids):
            generation.absorb(Chunk(generation.request_id, [], [], 0, FinishReason.ABORT), "")


def read_prompt(record: Record, turns: list[Turn]) -> Prompt:
    """`turns` are those of the session so far."""
    values = dict(zip(_PROMPT_FIELDS, record["prompt"], strict=True))
    parent = None if values["parent"] is None else turns[values["parent"]]
    decoded = {
        "parent": parent,
        "ids": np.frombuffer(values["ids"], dtype=np.int32),
        "messages": orjson.loads(values["messages"]),
        "num_samples": 0,
    }
    return Prompt(**values | decoded)


def read_turn(record: Record, prompt: Prompt, before: Tokens) -> Turn:
    """`before` are the tokens of its chunks."""
    value = record["turn"]
    tokens = Tokens.joined([before, Tokens.of(*value[3:6])])
    message, finish_reason, sampled_how = value[6:9]
    return Turn(
        prompt,
        *tokens,
        message=orjson.loads(message),
        finish_reason=FinishReason(finish_reason),
        sampling=Sampling(*sampled_how),
        **dict(zip(_TURN_FACTS, value[9:], strict=True)),
    )


_PROMPT_FIELDS = [field.name for field in fields(Prompt)]
_TURN_FACTS = ["engine", "interruptions", "num_unparsed_calls", "index"]


def _prompt_value(prompt: Prompt) -> list[Any]:
    values = {name: getattr(prompt, name) for name in _PROMPT_FIELDS}
    values["parent"] = None if prompt.parent is None else prompt.parent.index
    values["ids"] = prompt.ids.tobytes()
    # JSON, because MessagePack has no integers of more than 64 bits
    values["messages"] = orjson.dumps(prompt.messages)
    return list(values.values())


def claim_value(claim: Claim) -> list[Any]:
    return [*claim.place, claim.attempt]


def read_claim(value: list[Any]) -> Claim:
    split, group, member, attempt = value
    return Claim(Place(split, group, member), attempt)


def kind_of(record: Record) -> str:
    return next(iter(record))


def places(record: Record) -> set[tuple[Literal["train", "holdout"], int]]:
    """(split, group) of every claim and group that a record is about."""
    match kind_of(record):
        case "rejected":
            return {("train", record["rejected"][0])}
        case "opened":
            return {(claim[0], claim[1]) for _, claim, _, _ in record["opened"] if claim is not None}
        case "finished" | "failed" | "lost" as kind:
            return {(record[kind][0], record[kind][1])}
    return set()


def _trajectory_value(trajectory: Trajectory) -> dict[str, Any]:
    value = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
    for name, dtype in _ARRAYS.items():
        value[name] = np.asarray(value[name], dtype=dtype).tobytes()
    value["turns"] = [_turn_values(turn) for turn in trajectory.turns]
    return value


def _read_trajectory(value: dict[str, Any]) -> Trajectory:
    arrays: dict[str, Any] = {n: np.frombuffer(value[n], dtype=dtype) for n, dtype in _ARRAYS.items()}
    return Trajectory(**value | arrays | {"turns": [TurnSpan(*turn) for turn in value["turns"]]})
