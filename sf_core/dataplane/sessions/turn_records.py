"""The journal's records of turns, as MessagePack values and back.

Deltas only: a prompt names the prompt or turn whose tokens it begins with, a turn's record holds the tokens
that no chunk before it held.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from sf_core.dataplane.journal.journal import Record
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.tree import Node, Prompt, Seam, TextMark, Turn
from sf_core.types import Chunk, FinishReason, Sampling

if TYPE_CHECKING:
    from sf_core.dataplane.sessions.session import Session


class TurnKey(NamedTuple):
    """Identifies a turn within its run, from its beginning on."""

    session_id: str
    prompt: int
    """Index of its prompt."""
    sample: int


def begun_record(key: TurnKey, nth: int, identity: bytes, prompts: Sequence[Prompt]) -> Record:
    """A turn was begun, the `nth` sample of its request. `prompts` are those opened since the session's last
    such record: later prompts may begin with the tokens of any of them."""
    return {"begun": [*key, nth, identity], "prompts": [_prompt_value(prompt) for prompt in prompts]}


def chunk_record(key: TurnKey, tokens: Tokens, engine: str) -> Record:
    return {"chunk": [*key, *tokens.value(), engine]}


def turn_record(key: TurnKey, turn: Turn, num_recorded: int) -> Record:
    """A turn has ended; its first `num_recorded` tokens are in chunk records already."""
    tail = Tokens(turn.ids, turn.logprobs, turn.versions).since(num_recorded)
    facts = [getattr(turn, name) for name in _TURN_FACTS]
    sampling = turn.sampling
    sampled_how = [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed]
    return {
        "turn": [*key, *tail.value(), orjson.dumps(turn.message), turn.finish_reason, sampled_how, *facts]
    }


def delivered_record(key: TurnKey) -> Record:
    """All of a turn's answer was sent to the agent."""
    return {"delivered": list(key)}


def overflowed_record(session_id: str) -> Record:
    """A request of the session did not fit into the context window."""
    return {"overflowed": [session_id]}


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
    """A turn that was begun, as far as it is recorded: what a restart finds of it, and what remains of it
    when no client waits for it."""

    key: TurnKey
    identity: bytes
    """Identifies its request when that is retried (Ticket.identity)."""
    prompt: Prompt
    chunks: list[Tokens] = field(default_factory=list)
    """Tokens sampled so far; empty once it is finished."""
    engines: str = ""
    turn: Turn | None = None
    """The finished turn; None until then."""
    delivered: bool = False
    unanswered: bool = False
    """Its answer was not delivered; False for turns that a restart found, where this is not known."""

    @property
    def tokens(self) -> Tokens:
        if self.turn is not None:
            return Tokens(self.turn.ids, self.turn.logprobs, self.turn.versions)
        if len(self.chunks) > 1:
            self.chunks = [Tokens.joined(self.chunks)]
        return self.chunks[0] if self.chunks else NO_TOKENS

    @property
    def is_unanswered(self) -> bool:
        """Its answer was not delivered, and no later turn extends it."""
        return self.unanswered and self.turn is not None and not self.turn.has_continuation

    def may_be_asked_again(self, prompt: Prompt, identity: bytes) -> bool:
        """Whether its request may be retried after a request of this identity has asked `prompt`: an agent
        that extends an answer has received it."""
        is_extended = prompt.continues is not None and prompt.continues is self.turn
        return self.turn is None or not (is_extended or identity == self.identity)

    def restore(self, generation: Generation) -> None:
        """Bring a new generation of the same request to the state of this turn."""
        ids, logprobs, versions = self.tokens
        edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(ids)] if len(ids) else []
        for start, end in pairwise(edges):
            chunk = ids[start:end].tolist(), logprobs[start:end].tolist(), int(versions[start])
            generation.absorb(Chunk(generation.request_id, *chunk), "")
        generation.engines = self.engines.split(",") if self.engines else []
        if self.turn is not None:
            generation.interruptions = self.turn.interruptions
            generation.finish(self.turn.finish_reason)
        elif len(ids) and int(ids[-1]) in generation.stop_token_ids:
            generation.finish(FinishReason.STOP)
        elif len(ids):
            generation.absorb(Chunk(generation.request_id, [], [], 0, FinishReason.ABORT), "")


def read_prompt(value: list[Any], session: Session) -> Prompt:
    """The prompt of a record; refers to prompts and turns that the session already has."""
    # journals of earlier versions lack the last fields
    values = dict(zip(_PROMPT_FIELDS, value, strict=False))
    continues = None if values["continues"] is None else session.turns[values["continues"]]
    decoded = {
        "parent": _read_node(values["parent"], session),
        "ids": np.frombuffer(values["ids"], dtype=np.int32),
        "continues": continues,
        "tools": values.get("tools", b"") if continues is None else continues.prompt.tools,
        "messages": orjson.loads(values["messages"]),
        "text": TextMark(*values["text"]),
        "seam": values["seam"] and Seam(values["seam"][0], TextMark(*values["seam"][1])),
    }
    return Prompt(**values | decoded)


def read_turn(record: Record, prompt: Prompt, before: Tokens) -> Turn:
    """The turn of a record; `before` are the tokens of its chunk records."""
    value = record["turn"]
    tokens = Tokens.joined([before, Tokens.of(*value[3:6])])
    message, finish_reason, sampled_how = value[6:9]
    return Turn(
        prompt,
        value[2],
        *tokens,
        message=orjson.loads(message),
        finish_reason=FinishReason(finish_reason),
        sampling=Sampling(*sampled_how),
        **dict(zip(_TURN_FACTS, value[9:], strict=True)),
    )


_PROMPT_FIELDS = [field.name for field in fields(Prompt) if field.name not in ("num_samples", "tapes")]
_TURN_FACTS = ["engine", "interruptions", "num_unparsed_calls", "index"]


def _prompt_value(prompt: Prompt) -> list[Any]:
    values = {name: getattr(prompt, name) for name in _PROMPT_FIELDS}
    values["parent"] = _node_value(prompt.parent)
    values["continues"] = None if prompt.continues is None else prompt.continues.index
    values["ids"] = prompt.ids.tobytes()
    values["tools"] = prompt.tools if prompt.continues is None else b""
    # JSON, because MessagePack has no integers of more than 64 bits
    values["messages"] = orjson.dumps(prompt.messages)
    return list(values.values())


def _node_value(node: Node | None) -> list[Any] | None:
    return None if node is None else [isinstance(node, Turn), node.index]


def _read_node(value: list[Any] | None, session: Session) -> Node | None:
    if value is None:
        return None
    is_turn, index = value
    return session.turns[index] if is_turn else session.prompts[index]
