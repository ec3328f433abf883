"""Events of turns, as journals hold them, and what is recorded of a turn by them.

Deltas only: a prompt names the prompt or turn whose tokens it begins with, the end of a turn holds the tokens
that no chunk before it held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sf_core.dataplane.journal.events import Event, reader
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.tree import Prompt, Seam, TextMark, Turn
from sf_core.types import Chunk, FinishReason, Ids, Sampling


class TurnKey(NamedTuple):
    """Identifies a turn within its run, from its beginning on."""

    session_id: str
    prompt: int
    """Index of its prompt."""
    sample: int


class SampledTokens(NamedTuple):
    """Sampled tokens in order, with their log-probs and policy versions."""

    ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: Ids

    @classmethod
    def join(cls, parts: Sequence[SampledTokens]) -> SampledTokens:
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else NO_TOKENS

    @classmethod
    def of(cls, generation: Generation, start: int, end: int) -> SampledTokens:
        return cls(
            np.frombuffer(generation.token_ids[start:end], dtype=np.int32),
            np.frombuffer(generation.logprobs[start:end], dtype=np.float32),
            np.frombuffer(generation.versions[start:end], dtype=np.int32),
        )


NO_TOKENS = SampledTokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


class NewPrompt(msgspec.Struct, array_like=True):
    """A prompt (tree.py) whose references to other nodes are indices."""

    parent: tuple[bool, int] | None
    """Whether it is a turn, and its index among the turns or prompts of the session."""
    start: int
    ids: Ids
    continues: int | None
    messages: bytes
    """JSON, because MessagePack has no integers of more than 64 bits."""
    num_messages: int
    chain: bytes
    index: int
    text: TextMark
    seam: Seam | None
    branch_reason: str | None
    forced: str
    opening: list[bytes]
    tools: bytes
    """Empty if it continues a turn, whose tools are the same."""

    @classmethod
    def of(cls, prompt: Prompt) -> NewPrompt:
        parent = prompt.parent
        continues = prompt.continues
        values = {name: getattr(prompt, name) for name in cls.__struct_fields__} | {
            "parent": None if parent is None else (isinstance(parent, Turn), parent.index),
            "continues": None if continues is None else continues.index,
            "messages": msgspec.json.encode(prompt.messages),
            "tools": prompt.tools if continues is None else b"",
        }
        return cls(**values)

    def resolve(self, prompts: Sequence[Prompt], turns: Sequence[Turn]) -> Prompt:
        """The prompt among those of its session, which has all nodes that it refers to."""
        values = msgspec.structs.asdict(self) | {"messages": msgspec.json.decode(self.messages)}
        if self.parent is not None:
            is_turn, index = self.parent
            values["parent"] = turns[index] if is_turn else prompts[index]
        if self.continues is not None:
            turn = turns[self.continues]
            values |= {"continues": turn, "tools": turn.prompt.tools}
        return Prompt(**values)


class OfTurn(Event):
    key: TurnKey

    @property
    def session_id(self) -> str:
        return self.key.session_id


class Begun(OfTurn, tag="begun"):
    """A turn was begun."""

    nth: int
    """Its index among the samples of its request."""
    identity: bytes
    """Identifies its request when that is retried (RequestIdentity.digest)."""
    prompts: list[NewPrompt]
    """Prompts opened since the session's last such event: later ones may begin with the tokens of any."""


class Sampled(OfTurn, tag="sampled"):
    """Tokens of a turn were sampled, by these engines so far."""

    tokens: SampledTokens
    engines: str


class TurnEnded(OfTurn, tag="ended"):
    """A turn has ended."""

    tokens: SampledTokens
    """Tokens that no event before holds."""
    message: bytes
    """JSON."""
    finish_reason: FinishReason
    engine: str
    sampling: Sampling
    interruptions: int
    num_unparsed_calls: int
    index: int
    constrained: bool = False

    @classmethod
    def of(cls, key: TurnKey, turn: Turn, num_recorded: int) -> TurnEnded:
        """The end of a turn whose first `num_recorded` tokens are recorded already."""
        rest = slice(num_recorded, None)
        tail = SampledTokens(turn.ids[rest], turn.logprobs[rest], turn.versions[rest])
        facts = (getattr(turn, name) for name in _TURN_FACTS)
        return cls(key, tail, msgspec.json.encode(turn.message), *facts)

    def make_turn(self, prompt: Prompt, before: SampledTokens) -> Turn:
        """The turn; `before` are its tokens in earlier events."""
        tokens = SampledTokens.join([before, self.tokens])
        facts = (getattr(self, name) for name in _TURN_FACTS)
        return Turn(prompt, self.key.sample, *tokens, msgspec.json.decode(self.message), *facts)


_TURN_FACTS = TurnEnded.__struct_fields__[3:]
"""Fields of a turn that its end has as they are."""


class Delivered(OfTurn, tag="delivered"):
    """All of a turn's answer was sent to the agent."""


class Overflowed(Event, tag="overflowed"):
    """A request of the session did not fit into the context window."""

    session_id: str


TurnEvent = Begun | Sampled | TurnEnded | Delivered | Overflowed

read_turn_event: Callable[[bytes], TurnEvent] = reader(TurnEvent)


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """A turn that was begun, as far as it is recorded: what a restart finds of it, and what remains of it
    when no client waits for it."""

    key: TurnKey
    identity: bytes
    """Identifies its request when that is retried (RequestIdentity.digest)."""
    prompt: Prompt
    chunks: list[SampledTokens] = field(default_factory=list)
    """Tokens sampled so far; empty once it is finished."""
    engines: str = ""
    turn: Turn | None = None
    """The finished turn; None until then."""
    delivered: bool = False
    unanswered: bool = False
    """Its answer was not delivered; False for turns that a restart found, where this is not known."""

    @property
    def tokens(self) -> SampledTokens:
        if self.turn is not None:
            return SampledTokens(self.turn.ids, self.turn.logprobs, self.turn.versions)
        if len(self.chunks) > 1:
            self.chunks = [SampledTokens.join(self.chunks)]
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
        for start, end in _spans_of_versions(versions):
            chunk = Chunk(
                generation.request_id,
                ids[start:end].tolist(),
                logprobs[start:end].tolist(),
                int(versions[start]),
            )
            generation.absorb(chunk, "")
        generation.engines = self.engines.split(",") if self.engines else []
        if self.turn is not None:
            generation.interruptions = self.turn.interruptions
            generation.finish(self.turn.finish_reason)
        elif len(ids) and int(ids[-1]) in generation.request.stop_token_ids:
            generation.finish(FinishReason.STOP)
        elif len(ids):
            generation.interrupt("")


def _spans_of_versions(versions: Ids) -> Iterator[tuple[int, int]]:
    """Start and end of each series of tokens that one policy version sampled."""
    if len(versions):
        changes = np.flatnonzero(np.diff(versions)) + 1
        yield from pairwise([0, *changes.tolist(), len(versions)])
