"""One session's turn tree: which recorded turn a request extends, and what it adds.

Owns token truth (design 5.3): recorded ids are reused, only what follows them is encoded. Prompts and turns
alternate and hold deltas, so memory grows with the new tokens, not with the history.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from sf_core.dataplane.generation import Generation
from sf_core.dataplane.groups import Claim
from sf_core.dataplane.messages import Message, chain_keys, extend_chain
from sf_core.dataplane.rendering import Ids, Renderer
from sf_core.dataplane.toolcalls import Tool
from sf_core.types import FinishReason, Sampling

if TYPE_CHECKING:
    from sf_core.dataplane.inflight import ServedTurn
    from sf_core.dataplane.turn_records import RecordedTurn


@dataclass(slots=True, eq=False)
class Prompt:
    """What one request adds to a recorded turn, or to nothing. Asked again, it gets another turn."""

    parent: Turn | None
    ids: Ids
    messages: list[Message]
    """Those it adds."""
    num_messages: int
    """Of the whole request."""
    chain: bytes
    """Identity of the whole request: tools and all messages."""
    index: int
    """Position among the session's prompts."""
    start: int
    """Tokens before it."""
    text_length: int
    """Of the rendering of the whole request, which any later extension begins with."""
    text_hash: bytes
    branch_reason: str | None
    """Why it is no extension of the session's tokens so far; None if it is, and for the first."""
    num_samples: int = 0
    """Turns begun from it."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def version(self) -> int:
        """Policy version of the last sampled token before it; 0 if there is none."""
        turn = self.parent
        while turn is not None and not len(turn.versions):
            turn = turn.prompt.parent
        return int(turn.versions[-1]) if turn is not None else 0

    def full_ids(self) -> list[int]:
        parts: list[Ids] = [self.ids]
        turn = self.parent
        while turn is not None:
            parts += [turn.ids, turn.prompt.ids]
            turn = turn.prompt.parent
        return np.concatenate(parts[::-1]).tolist()


@dataclass(slots=True, eq=False)
class Turn:
    """What was sampled for a prompt."""

    prompt: Prompt
    ids: Ids
    logprobs: np.ndarray
    versions: np.ndarray
    message: Message
    finish_reason: FinishReason
    engine: str
    sampling: Sampling
    interruptions: int
    num_unparsed_calls: int
    has_continuation: bool = False
    index: int = 0
    """Position among the session's turns."""

    @property
    def end(self) -> int:
        return self.prompt.end + len(self.ids)

    def lineage(self) -> Iterator[Turn]:
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.prompt.parent


@dataclass(slots=True, eq=False)
class Session:
    session_id: str
    claim: Claim | None = None
    """None for ad-hoc sessions, which never train."""
    runner: str = ""
    expires_at: float = float("inf")
    """On the run's serving clock."""
    floor: int = 0
    """Oldest policy version that may answer it."""
    started_at: float = field(default_factory=time.time)
    turns: list[Turn] = field(default_factory=list)
    abandoned: list[Turn] = field(default_factory=list)
    """Turns whose answer nobody got, as far as they came. Never trained."""
    served: list[ServedTurn] = field(default_factory=list)
    """Turns whose request may come again: those in flight, and those that no later one extends."""
    recorded: list[RecordedTurn] = field(default_factory=list)
    """The same, as a restart found them in the journal."""
    running: set[Generation] = field(default_factory=set)
    branch_reasons: Counter[str] = field(default_factory=Counter)
    _prompts: dict[bytes, Prompt] = field(default_factory=dict)
    _num_prompts: int = 0
    """Indices given so far."""
    _answers: dict[bytes, Turn] = field(default_factory=dict)
    """By identity of the request extended by the answer."""
    _openings: set[bytes] = field(default_factory=set)
    """Identities of tools, and of tools and first message, seen so far."""

    def open_prompt(self, messages: list[Message], tools: list[Tool], renderer: Renderer) -> Prompt:
        """The prompt this request stands for, new or asked before. Raises jinja2.TemplateError."""
        keys = chain_keys(tools, messages)
        prompt = self._prompts.get(keys[-1])
        if prompt is None:
            prompt = self._add_prompt(keys, messages, renderer.render(messages, tools), renderer)
            self._openings.update(keys[:2])
        self._count(prompt)
        return prompt

    def commit(
        self, generation: Generation, prompt: Prompt, message: Message, num_unparsed_calls: int
    ) -> Turn:
        """Record a finished turn; the agent gets its answer after this."""
        assert generation.finish_reason is not None
        reason, index = generation.finish_reason, len(self.turns)
        turn = _turn(generation, prompt, message, reason, num_unparsed_calls, index)
        self._add_turn(turn)
        return turn

    def abandon(self, generation: Generation, prompt: Prompt, message: Message) -> Turn:
        """Record what there is of a turn that nobody waits for any more."""
        turn = _turn(generation, prompt, message, FinishReason.ABORT, 0, len(self.abandoned))
        self.abandoned.append(turn)
        return turn

    def set_aside_unanswered(self) -> int:
        """Tokens count if their answer was given: a turn that ended after its client had gone for good is an
        abandoned one. What a restart found is believed to have arrived. For the end of the session; returns
        how many there were."""
        unanswered = {served.turn.turn for served in self.served if served.is_unanswered}
        aside = [turn for turn in self.turns if turn in unanswered]
        self.turns = [turn for turn in self.turns if turn not in unanswered]
        self.abandoned += aside
        return len(aside)

    def restore_prompt(self, prompt: Prompt) -> None:
        """Take back a prompt that was recorded before a restart."""
        self._prompts[prompt.chain] = prompt
        self._num_prompts = max(self._num_prompts, prompt.index + 1)

    def restore_sample(self, prompt: Prompt, sample: int) -> None:
        """A turn was begun from this prompt before a restart."""
        self._count(prompt)
        prompt.num_samples = sample + 1

    def restore_turn(self, turn: Turn) -> None:
        """Take back a turn, finished or abandoned, that was recorded before a restart."""
        if turn.finish_reason is FinishReason.ABORT:
            self.abandoned.append(turn)
        else:
            self._add_turn(turn)

    def _count(self, prompt: Prompt) -> None:
        if prompt.num_samples:
            self.branch_reasons["asked_again"] += 1
        elif prompt.branch_reason is not None:
            self.branch_reasons[prompt.branch_reason] += 1

    def _add_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._answers[extend_chain(turn.prompt.chain, turn.message)] = turn
        if turn.prompt.parent is not None:
            turn.prompt.parent.has_continuation = True

    def _add_prompt(
        self, keys: list[bytes], messages: list[Message], text: str, renderer: Renderer
    ) -> Prompt:
        matched, num_matched = self._longest_match(keys)
        parent: Turn | None = None
        ids: Ids | None = None
        for turn in matched.lineage() if matched else ():
            ids = _suffix_ids(turn, text, renderer)
            if ids is not None:
                parent = turn
                break
        if parent is None:
            ids = renderer.encode(text)
        assert ids is not None
        reason = self._branch_reason(keys, messages[num_matched:], matched, parent)
        prompt = Prompt(
            parent,
            ids,
            messages[parent.prompt.num_messages + 1 if parent else 0 :],
            len(messages),
            keys[-1],
            self._num_prompts,
            parent.end if parent else 0,
            len(text),
            _text_hash(text),
            reason,
        )
        self._prompts[prompt.chain] = prompt
        self._num_prompts += 1
        return prompt

    def _longest_match(self, keys: list[bytes]) -> tuple[Turn | None, int]:
        """The deepest recorded turn whose conversation begins this one, and how many messages they share."""
        for i in range(len(keys) - 1, 0, -1):
            if (turn := self._answers.get(keys[i])) is not None:
                return turn, i
        return None, 0

    def _branch_reason(
        self, keys: list[bytes], added: list[Message], matched: Turn | None, parent: Turn | None
    ) -> str | None:
        if not self._prompts:
            return None
        if matched is not parent:
            return "template_rewrote"
        if any(message["role"] == "assistant" for message in added):
            return "edited_history"
        if matched is not None:
            return "forked" if matched.has_continuation else None
        if keys[0] not in self._openings:
            return "other_tools"
        return "new_conversation" if keys[1] in self._openings else "other_system"


def _turn(
    generation: Generation,
    prompt: Prompt,
    message: Message,
    finish_reason: FinishReason,
    num_unparsed_calls: int,
    index: int,
) -> Turn:
    return Turn(
        prompt,
        np.array(generation.token_ids, dtype=np.int32),
        np.array(generation.logprobs, dtype=np.float32),
        np.array(generation.versions, dtype=np.int32),
        message,
        finish_reason,
        ",".join(generation.engines),
        generation.sampling,
        generation.interruptions,
        num_unparsed_calls,
        index=index,
    )


def _text_hash(text: str) -> bytes:
    """The same in every process, unlike hash(): it is compared after a restart."""
    return blake2b(text.encode(), digest_size=16).digest()


def _suffix_ids(turn: Turn, text: str, renderer: Renderer) -> Ids | None:
    """Ids of what a rendering adds to a recorded turn; None if it is no extension of its prompt."""
    prompt = turn.prompt
    if _text_hash(text[: prompt.text_length]) != prompt.text_hash:
        return None
    if any(stop in str(turn.message) for stop in renderer.stop_texts.values()):
        # the answer spells an end-of-turn token in ordinary ones: the cut would fall inside it
        return None
    last_id = int(turn.ids[-1]) if len(turn.ids) else None
    suffix = renderer.suffix_after_turn(text[prompt.text_length :], last_id)
    return None if suffix is None else renderer.encode(suffix)


def turn_seed(run_seed: int, place: tuple[str | int, ...], prompt_index: int, sample: int) -> int:
    """Unsigned 64-bit key of a turn. It leaves out the attempt: given out again, a session draws the same."""
    text = ".".join(map(str, (run_seed, *place, prompt_index, sample)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
