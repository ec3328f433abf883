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
from typing import Any

import numpy as np

from sf_core.dataplane.generation import Generation
from sf_core.dataplane.groups import Claim
from sf_core.dataplane.messages import Message, chain_keys, extend_chain
from sf_core.dataplane.rendering import Ids, Renderer
from sf_core.dataplane.toolcalls import Tool
from sf_core.types import FinishReason, Sampling


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
    text_hash: int
    branch_reason: str | None
    """Why it is no extension of the session's tokens so far; None if it is, and for the first."""
    num_samples: int = 0
    """Turns begun from it."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def continues(self) -> Turn | None:
        """The answer that its new messages follow."""
        return self.parent

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

    @property
    def end(self) -> int:
        return self.prompt.end + len(self.ids)

    def conversation(self) -> Iterator[Turn]:
        """This turn and those its messages follow, latest first."""
        return self.lineage()

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
    task_id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever its maker wrote."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    responses: dict[str, Any] = field(default_factory=dict)
    """What the Responses dialect keeps for later requests to refer to."""
    started_at: float = field(default_factory=time.time)
    turns: list[Turn] = field(default_factory=list)
    running: set[Generation] = field(default_factory=set)
    branch_reasons: Counter[str] = field(default_factory=Counter)
    _prompts: dict[bytes, Prompt] = field(default_factory=dict)
    _answers: dict[bytes, Turn] = field(default_factory=dict)
    """By identity of the request extended by the answer."""
    _openings: set[bytes] = field(default_factory=set)
    """Identities of tools, and of tools and first message, seen so far."""

    @property
    def prompts(self) -> list[Prompt]:
        """In the order in which they were first asked."""
        return list(self._prompts.values())

    def open_prompt(
        self, messages: list[Message], tools: list[Tool], renderer: Renderer, forced: str = ""
    ) -> Prompt:
        """The prompt this request stands for, new or asked before. `forced`: how the answer begins; it is
        part of the prompt's ids, not of its text. Raises jinja2.TemplateError."""
        keys = chain_keys(tools, messages)
        prompt = self._prompts.get(_asked_key(keys[-1], forced))
        if prompt is None:
            text = renderer.render(messages, tools)
            prompt = self._add_prompt(keys, messages, text, renderer, forced)
            self._openings.update(keys[:2])
        return self._ask(prompt)

    def open_ids(self, ids: list[int]) -> Prompt:
        """The prompt that these ids are; it extends the longest recorded turn they begin with."""
        key = blake2b(np.array(ids, dtype=np.int32).tobytes(), digest_size=16, person=b"ids").digest()
        prompt = self._prompts.get(key)
        if prompt is None:
            parent = self._longest_prefix(ids)
            start = parent.end if parent else 0
            reason = None if parent is not None or not self._prompts else "new_conversation"
            if parent is not None and parent.has_continuation:
                reason = "forked"
            own = np.array(ids[start:], dtype=np.int32)
            prompt = Prompt(parent, own, [], 0, key, len(self._prompts), start, 0, hash(""), reason)
            self._prompts[key] = prompt
        return self._ask(prompt)

    def _longest_prefix(self, ids: list[int]) -> Turn | None:
        for turn in sorted(self.turns, key=lambda turn: turn.end, reverse=True):
            if turn.end <= len(ids) and turn.prompt.full_ids() + turn.ids.tolist() == ids[: turn.end]:
                return turn
        return None

    def _ask(self, prompt: Prompt) -> Prompt:
        if prompt.num_samples:
            self.branch_reasons["asked_again"] += 1
        elif prompt.branch_reason is not None:
            self.branch_reasons[prompt.branch_reason] += 1
        return prompt

    def commit(
        self, generation: Generation, prompt: Prompt, message: Message, num_unparsed_calls: int
    ) -> None:
        """Record a finished turn; the agent gets its answer after this."""
        assert generation.finish_reason is not None
        turn = Turn(
            prompt,
            np.array(generation.token_ids, dtype=np.int32),
            np.array(generation.logprobs, dtype=np.float32),
            np.array(generation.versions, dtype=np.int32),
            message,
            generation.finish_reason,
            ",".join(generation.engines),
            generation.sampling,
            generation.interruptions,
            num_unparsed_calls,
        )
        self.turns.append(turn)
        self._answers[extend_chain(prompt.chain, message)] = turn
        if prompt.parent is not None:
            prompt.parent.has_continuation = True

    def _add_prompt(
        self, keys: list[bytes], messages: list[Message], text: str, renderer: Renderer, forced: str
    ) -> Prompt:
        matched, num_matched = self._longest_match(keys)
        parent: Turn | None = None
        ids: Ids | None = None
        for turn in matched.lineage() if matched else ():
            ids = _suffix_ids(turn, text, renderer, forced)
            if ids is not None:
                parent = turn
                break
        if parent is None:
            ids = renderer.encode(text + forced)
        assert ids is not None
        reason = self._branch_reason(keys, messages[num_matched:], matched, parent)
        prompt = Prompt(
            parent,
            ids,
            messages[parent.prompt.num_messages + 1 if parent else 0 :],
            len(messages),
            keys[-1],
            len(self._prompts),
            parent.end if parent else 0,
            len(text),
            hash(text),
            reason,
        )
        self._prompts[_asked_key(prompt.chain, forced)] = prompt
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


def _asked_key(chain: bytes, forced: str) -> bytes:
    return chain + forced.encode()


def _suffix_ids(turn: Turn, text: str, renderer: Renderer, forced: str) -> Ids | None:
    """Ids of what a rendering adds to a recorded turn; None if it is no extension of its prompt."""
    prompt = turn.prompt
    if hash(text[: prompt.text_length]) != prompt.text_hash:
        return None
    if any(stop in str(turn.message) for stop in renderer.stop_texts.values()):
        # the answer spells an end-of-turn token in ordinary ones: the cut would fall inside it
        return None
    last_id = int(turn.ids[-1]) if len(turn.ids) else None
    suffix = renderer.suffix_after_turn(text[prompt.text_length :], last_id)
    return None if suffix is None else renderer.encode(suffix + forced)


def turn_seed(run_seed: int, place: tuple[str | int, ...], prompt_index: int, sample: int) -> int:
    """Unsigned 64-bit key of a turn. It leaves out the attempt: given out again, a session draws the same."""
    text = ".".join(map(str, (run_seed, *place, prompt_index, sample)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
