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

from sf_core.dataplane.journal.journal_file import Event, make_decoder
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.tree import LastTurnBoundary, PrefixDigest, Prompt, Turn
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
    def from_generation(cls, generation: Generation, start: int, end: int) -> SampledTokens:
        return cls(
            np.frombuffer(generation.token_ids[start:end], dtype=np.int32),
            np.frombuffer(generation.logprobs[start:end], dtype=np.float32),
            np.frombuffer(generation.versions[start:end], dtype=np.int32),
        )


NO_TOKENS = SampledTokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


class NewPrompt(msgspec.Struct, array_like=True):
    """A prompt (tree.py), in which indices stand for references to other nodes."""

    parent: tuple[bool, int] | None
    """Whether the parent is a turn, and its index among the turns or prompts of the session."""
    start: int
    ids: Ids
    continues: int | None
    messages: bytes
    """JSON, because MessagePack has no integers of more than 64 bits."""
    num_messages: int
    chain: bytes
    index: int
    text: PrefixDigest
    seam: LastTurnBoundary | None
    branch_reason: str | None
    forced: str
    opening: list[bytes]
    tools: bytes
    """Empty if it continues a turn, whose tools are the same."""

    @classmethod
    def from_prompt(cls, prompt: Prompt) -> NewPrompt:
        parent = prompt.parent
        continues = prompt.continues
        return cls(
            None if parent is None else (isinstance(parent, Turn), parent.index),
            prompt.start,
            prompt.ids,
            None if continues is None else continues.index,
            msgspec.json.encode(prompt.messages),
            prompt.num_messages,
            prompt.chain,
            prompt.index,
            prompt.rendered,
            prompt.boundary,
            prompt.branch_reason,
            prompt.forced,
            [*prompt.opening],
            prompt.tools if continues is None else b"",
        )

    def resolve(self, prompts: Sequence[Prompt], turns: Sequence[Turn]) -> Prompt:
        """The prompt. `prompts` and `turns` of its session have all nodes to which it refers."""
        parent: Prompt | Turn | None = None
        if self.parent is not None:
            is_turn, index = self.parent
            parent = turns[index] if is_turn else prompts[index]
        continues = None if self.continues is None else turns[self.continues]
        return Prompt(
            parent,
            self.start,
            self.ids,
            continues,
            msgspec.json.decode(self.messages),
            self.num_messages,
            self.chain,
            self.index,
            self.text,
            self.seam,
            self.branch_reason,
            self.forced,
            self.opening,
            self.tools if continues is None else continues.prompt.tools,
        )


class OfTurn(Event):
    key: TurnKey

    @property
    def session_id(self) -> str:
        return self.key.session_id


class Begun(OfTurn, tag="begun"):
    """A turn was begun."""

    nth: int
    """Index of the turn among the samples of its request."""
    identity: bytes
    """Digest by which a retry of the request is recognised (RequestIdentity.digest)."""
    prompts: list[NewPrompt]
    """Prompts opened since the session's last such event: later prompts may begin with the tokens of any."""


class Sampled(OfTurn, tag="sampled"):
    """Tokens of a turn were sampled; `engines` are all that have sampled for the turn so far."""

    tokens: SampledTokens
    engines: str


class TurnEnded(OfTurn, tag="ended"):
    """A turn has ended."""

    tokens: SampledTokens
    """Tokens that no earlier event holds."""
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
    def from_turn(cls, key: TurnKey, turn: Turn, num_recorded: int) -> TurnEnded:
        """The end of a turn whose first `num_recorded` tokens are recorded already."""
        new = slice(num_recorded, None)
        new_tokens = SampledTokens(turn.ids[new], turn.logprobs[new], turn.versions[new])
        copied = (getattr(turn, name) for name in _COPIED_FIELDS)
        return cls(key, new_tokens, msgspec.json.encode(turn.message), *copied)

    def make_turn(self, prompt: Prompt, earlier: SampledTokens) -> Turn:
        """The turn; `earlier` are its tokens in earlier events."""
        tokens = SampledTokens.join([earlier, self.tokens])
        copied = (getattr(self, name) for name in _COPIED_FIELDS)
        return Turn(prompt, self.key.sample, *tokens, msgspec.json.decode(self.message), *copied)


_COPIED_FIELDS = TurnEnded.__struct_fields__[3:]
"""Fields that a turn and its end have in common, in the order of both."""


class Delivered(OfTurn, tag="delivered"):
    """All of a turn's answer was sent to the agent."""


class Overflowed(Event, tag="overflowed"):
    """A request of the session did not fit into the context window."""

    session_id: str


TurnEvent = Begun | Sampled | TurnEnded | Delivered | Overflowed

read_turn_event: Callable[[bytes], TurnEvent] = make_decoder(TurnEvent)


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """A turn that was begun, as far as it is recorded. A restart finds turns in this form, and so remains a
    turn for which no client waits."""

    key: TurnKey
    fingerprint: bytes
    """Digest by which a retry of the request is recognised (RequestIdentity.digest)."""
    prompt: Prompt
    chunks: list[SampledTokens] = field(default_factory=list)
    """Tokens sampled so far; empty once the turn is finished."""
    engines: str = ""
    turn: Turn | None = None
    """The finished turn; None until then."""
    delivered: bool = False
    undelivered: bool = False
    """Whether the answer is known not to be delivered; False for turns that a restart found."""

    @property
    def tokens(self) -> SampledTokens:
        if self.turn is not None:
            return SampledTokens(self.turn.ids, self.turn.logprobs, self.turn.versions)
        if len(self.chunks) > 1:
            self.chunks = [SampledTokens.join(self.chunks)]
        return self.chunks[0] if self.chunks else NO_TOKENS

    @property
    def never_arrived(self) -> bool:
        """Whether the answer was not delivered and no later turn extends it."""
        return self.undelivered and self.turn is not None and not self.turn.has_continuation

    def may_be_retried(self, prompt: Prompt, fingerprint: bytes) -> bool:
        """Whether the request may still be retried after a request with this fingerprint has asked `prompt`:
        an agent that extends an answer has received it."""
        is_extended = prompt.continues is not None and prompt.continues is self.turn
        return self.turn is None or not (is_extended or fingerprint == self.fingerprint)

    def restore(self, generation: Generation) -> None:
        """Bring a new generation of the same request to the state of this turn."""
        ids, logprobs, versions = self.tokens
        for start, end in _version_spans(versions):
            chunk = Chunk(
                generation.request_id,
                ids[start:end].tolist(),
                logprobs[start:end].tolist(),
                int(versions[start]),
            )
            generation.append(chunk, "")
        generation.engines = self.engines.split(",") if self.engines else []
        if self.turn is not None:
            generation.interruptions = self.turn.interruptions
            generation.finish(self.turn.finish_reason)
        elif len(ids) and int(ids[-1]) in generation.request.stop_token_ids:
            generation.finish(FinishReason.STOP)
        elif len(ids):
            generation.interrupt("")


def _version_spans(versions: Ids) -> Iterator[tuple[int, int]]:
    """Start and end of each series of tokens that one policy version sampled."""
    if len(versions):
        changes = np.flatnonzero(np.diff(versions)) + 1
        yield from pairwise([0, *changes.tolist(), len(versions)])
