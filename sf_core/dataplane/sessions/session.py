"""One session: which recorded turn a request extends, what it adds, and what was sampled for it.

Recorded ids are always reused; only the text after them is rendered and encoded. The tokens themselves are in
tree.py.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from sf_core.dataplane.api_schemas import RewardBody
from sf_core.dataplane.chat.messages import Message, comparable_answer, extend_chain, size_of, without_ids
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.claims import Claim, is_external
from sf_core.dataplane.sessions.conversation_keys import Conversation, Conversations
from sf_core.dataplane.sessions.encoding import Draft, Encoded, render_request
from sf_core.dataplane.sessions.images import SessionImages
from sf_core.dataplane.sessions.memory_budget import size_of_judgement
from sf_core.dataplane.sessions.tree import (
    EMPTY_PREFIX,
    SAMPLED_BYTES,
    PathBuffers,
    Position,
    Prompt,
    TokenTree,
    Turn,
    branch_reason,
    branch_reason_of_ids,
    find_repeated_turn,
    last_whole_turn,
)
from sf_core.dataplane.sessions.turn_events import (
    Begun,
    Delivered,
    Overflowed,
    RecordedTurn,
    Sampled,
    TurnEnded,
    TurnEvent,
)
from sf_core.types import FinishReason, Ids
from storage.tables.judgements import Judgement

__all__ = ["Prompt", "Session", "Turn"]

SESSION_BYTES = 2500
PROMPT_BYTES = 800
"""Measured memory of the objects, without tokens and texts."""


@dataclass(slots=True, eq=False)
class Session:
    session_id: str
    claim: Claim | None = None
    """None for a session that belongs to no group."""
    runner: str = ""
    began_at: float = float("inf")
    """When the time of the session began, on the run's serving clock; infinity while its time is not
    limited."""
    floor: int = 0
    """Oldest policy version that may answer the session's requests."""
    group: str | None = None
    by_operator: bool = False
    """Whether the operator opened the session: no client may read, reward or finish it then."""
    task_id: str = ""
    environment: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Free-form values given when the session was opened."""
    answer: str | None = None
    """The agent's answer as JSON, from the end of the agent until another runner has scored it."""
    waits_for_group: bool = False
    """Whether the answer will be scored together with those of its group, of which some are missing."""
    scoring: str = ""
    """Id of the claim by which a runner scores the answer; empty while none does."""
    num_unjudged: int = 0
    """Number of times that the answer could not be judged."""
    judgements: list[Judgement] = field(default_factory=list)
    """Questions to judges in these attempts, and their replies."""
    output: str | None = None
    """Output of the agent's process, from the end of the agent until another runner has scored the answer."""
    earned: RewardBody | None = None
    """The reward that the session was given before its end."""
    report: str = ""
    """Digest of the report that ends the session; empty until then, and if a time limit ends it."""
    started_at: float = field(default_factory=time.time)
    prompts: list[Prompt] = field(default_factory=list)
    """Prompts in the order of their first requests."""
    turns: list[Turn] = field(default_factory=list)
    abandoned: list[Turn] = field(default_factory=list)
    """Turns whose answers were not delivered, as far as they were sampled. Never trained on."""
    recorded: list[RecordedTurn] = field(default_factory=list)
    """Turns that are not in flight and whose request may be retried: no later turn extends them."""
    running: set[Generation] = field(default_factory=set)
    has_overflowed: bool = False
    """No turn was begun since a request did not fit into the context window."""
    branch_reasons: Counter[str] = field(default_factory=Counter)
    images: SessionImages = field(default_factory=SessionImages)
    _tree: TokenTree = field(default_factory=TokenTree)
    _path_buffers: PathBuffers = field(default_factory=PathBuffers)
    _conversations: Conversations = field(default_factory=Conversations)
    _prompts: dict[tuple[bytes, str], Prompt] = field(default_factory=dict)
    """Prompts by chain key and forced text."""
    _num_recorded: int = 0
    """Number of prompts that the journal holds."""
    _answers: dict[bytes, Turn] = field(default_factory=dict)
    """Turns by the chain key of their request and answer, with the ids of its calls and without."""
    _openings: set[bytes] = field(default_factory=set)
    """Chain keys of tools, and of tools with first message, seen so far."""
    _num_bytes: int = 0
    """Approximate memory of prompts and turns."""

    @property
    def is_external(self) -> bool:
        """Whether an external agent works on the session, which no runner runs."""
        return is_external(self.claim)

    def open_prompt(
        self, messages: list[Message], tools: list[Tool], renderer: Renderer, forced: str = ""
    ) -> Prompt:
        """The prompt of a request, new or asked before. Raises jinja2.TemplateError.

        `forced` is how the answer must begin; it is encoded as the end of the prompt."""
        draft = self.draft(messages, tools, renderer, forced)
        return draft if isinstance(draft, Prompt) else self.add(draft, draft.encode())

    def draft(
        self, messages: list[Message], tools: list[Tool], renderer: Renderer, forced: str = ""
    ) -> Draft | Prompt:
        """The prompt of a request that was asked before, else a draft of its prompt. Nothing is encoded. One
        request of the session at a time may be drafted, in any thread. Raises jinja2.TemplateError."""
        conversation = self._conversations.find_or_create(tools, messages, self._answers, renderer.options)
        keys = conversation.keys
        if (prompt := self._prompts.get((keys[-1], forced))) is not None:
            return prompt
        matched = self._find_longest_match(keys)
        num_matched = matched.prompt.num_messages + 1 if matched else 0
        if matched is not None:
            conversation.share_recorded_messages(matched)
        try:
            unencoded = render_request(conversation, matched, tools, renderer, self.images)
        except Exception:
            self.discard(conversation)
            raise
        added = conversation.messages[num_matched:]
        tools_json = b"" if matched or not tools else msgspec.json.encode(tools)
        num_bytes = sum(map(size_of, added))
        return Draft(conversation, matched, added, unencoded, forced, tools_json, num_bytes)

    def add(self, draft: Draft, encoded: Encoded) -> Prompt:
        """The prompt of a draft."""
        conversation = draft.conversation
        matched = draft.matched
        keys = conversation.keys
        reason = None
        if self._prompts:
            reason = branch_reason(encoded.position, matched, draft.added, keys, self._openings)
        return self._add_prompt(
            encoded,
            matched,
            draft.added,
            len(conversation.messages),
            keys[-1],
            reason,
            draft.forced,
            opening=() if matched else keys[:2],
            tools=draft.tools,
            num_bytes=draft.num_bytes,
        )

    def discard(self, conversation: Conversation) -> None:
        """Keep nothing of a request that is refused."""
        self._conversations.forget(conversation)

    def open_prompt_from_ids(self, ids: Sequence[int] | Ids) -> Prompt:
        """The prompt of these ids, new or asked before; the paths that begin with the same ids share them."""
        array = np.asarray(ids, dtype=np.int32)
        chain = blake2b(array.tobytes(), digest_size=16, person=b"ids").digest()
        prompt = self._prompts.get((chain, ""))
        if prompt is None:
            repeated = find_repeated_turn(self.turns, self._path_buffers, array)
            start = Position(repeated, repeated.end if repeated else 0)
            position, remainder = self._tree.follow(start, array[start.offset :])
            encoded = Encoded(position, remainder, EMPTY_PREFIX, None)
            continues = last_whole_turn(position)
            reason = branch_reason_of_ids(position) if self._prompts else None
            prompt = self._add_prompt(encoded, continues, [], 0, chain, reason)
        return prompt

    def begin_sample(self, prompt: Prompt, nth: int) -> int:
        """Count a turn begun from this prompt; returns its number among the prompt's turns. `nth` is the
        index of the turn in its request."""
        if nth == 0 and prompt.num_samples:
            self.branch_reasons["asked_again"] += 1
        elif nth == 0 and prompt.branch_reason is not None:
            self.branch_reasons[prompt.branch_reason] += 1
        self.has_overflowed = False
        prompt.num_samples += 1
        return prompt.num_samples - 1

    def turn_id(self, prompt: Prompt, sample: int) -> str:
        return f"{self.session_id}.{prompt.index}.{sample}"

    def find_turn(self, turn_id: str) -> Turn | None:
        """The finished turn with this id; searched from the latest one back."""
        return next((t for t in reversed(self.turns) if self.turn_id(t.prompt, t.sample) == turn_id), None)

    def find_turn_id(self, answer_id: str) -> str | None:
        """Id of the turn whose answer has this id in one of the APIs; None if it is of another session."""
        found = re.search(re.escape(self.session_id) + r"\.\d+\.\d+(?!\d)", answer_id)
        return None if found is None else found[0]

    def commit(
        self,
        generation: Generation,
        prompt: Prompt,
        sample: int,
        message: Message,
        num_unparsed_calls: int,
    ) -> Turn:
        """Record a finished turn; the agent gets its answer after this."""
        assert generation.finish_reason is not None
        reason = generation.finish_reason
        index = len(self.turns)
        turn = Turn.from_generation(generation, prompt, sample, message, reason, num_unparsed_calls, index)
        self._add_turn(turn)
        return turn

    def abandon(self, generation: Generation, prompt: Prompt, sample: int, message: Message) -> Turn:
        """Record the sampled part of a turn for which no client waits any more."""
        reason = FinishReason.ABORT
        turn = Turn.from_generation(generation, prompt, sample, message, reason, 0, len(self.abandoned))
        self._add_abandoned(turn)
        return turn

    def discard_answered(self, prompt: Prompt, fingerprint: bytes) -> None:
        """Discard recorded turns whose requests are not retried any more, now that a request with this
        fingerprint has asked `prompt`."""
        self.recorded = [turn for turn in self.recorded if turn.may_be_retried(prompt, fingerprint)]

    def abandon_undelivered(self, in_flight: Iterable[RecordedTurn] = ()) -> int:
        """When the session ends, move turns with undelivered answers to the abandoned ones: only delivered
        answers are trained on. Answers that a restart found count as delivered. Returns the number moved."""
        records = [*in_flight, *self.recorded]
        undelivered = {record.turn for record in records if record.never_arrived}
        moved = [turn for turn in self.turns if turn in undelivered]
        self.turns = [turn for turn in self.turns if turn not in undelivered]
        self.abandoned += moved
        return len(moved)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished turns: a retry continues them, the end of the session abandons them."""
        return sum(recorded.turn is None for recorded in self.recorded)

    def pop_unrecorded_prompts(self) -> list[Prompt]:
        """Prompts opened since the last call, for the journal."""
        start = self._num_recorded
        self._num_recorded = len(self.prompts)
        return self.prompts[start:]

    def apply(self, event: TurnEvent) -> None:
        """Repeat the effect of an event, after a restart. Events of one turn come in order; events of several
        turns may interleave."""
        if isinstance(event, Overflowed):
            self.has_overflowed = True
            return
        if isinstance(event, Begun):
            return self._apply_begun(event)
        recorded = next((known for known in reversed(self.recorded) if known.key == event.key), None)
        if recorded is None:
            return  # a later turn extended it before its delivery was written
        match event:
            case Sampled():
                recorded.engines = event.engines
                recorded.chunks.append(event.tokens)
            case TurnEnded():
                self._apply_ended(event, recorded)
            case Delivered():
                recorded.delivered = True

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled in the session so far, without abandoned turns."""
        finished = sum(len(turn.ids) for turn in self.turns)
        return finished + sum(len(generation.token_ids) for generation in self.running)

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes. Computing it takes no longer than the other work of each request."""
        parts = self.earned.reward_parts if self.earned else ()
        texts = [self.group, self.task_id, self.environment, self.answer, self.output, *parts]
        num_bytes = SESSION_BYTES + size_of(self.metadata) + size_of(texts)
        num_bytes += self._num_bytes
        num_bytes += self._path_buffers.num_bytes + self._conversations.num_bytes + self.images.num_bytes
        num_bytes += sum(map(size_of_judgement, self.judgements))
        for recorded in self.recorded:
            if recorded.turn is None:
                num_bytes += SAMPLED_BYTES * len(recorded.tokens.ids)
        return num_bytes

    def release(self) -> None:
        """Separate prompts and path buffers, so that their memory is freed with the last reference to the
        session."""
        self._path_buffers.clear()

    def _apply_begun(self, event: Begun) -> None:
        for new in event.prompts:
            prompt = new.resolve(self.prompts, self.turns)
            prompt.path_buffers = self._path_buffers
            self._register_prompt(prompt, sum(map(size_of, prompt.messages)))
            self.pop_unrecorded_prompts()
        prompt = self.prompts[event.key.prompt]
        self.begin_sample(prompt, event.nth)
        self.discard_answered(prompt, event.identity)
        self.recorded.append(RecordedTurn(event.key, event.identity, prompt))

    def _apply_ended(self, event: TurnEnded, recorded: RecordedTurn) -> None:
        turn = event.make_turn(recorded.prompt, recorded.tokens)
        if turn.finish_reason is FinishReason.ABORT:
            self._add_abandoned(turn)
            self.recorded.remove(recorded)
        else:
            self._add_turn(turn)
        recorded.turn = turn
        recorded.engines = turn.engine
        recorded.chunks = []

    def _add_abandoned(self, turn: Turn) -> None:
        self.abandoned.append(turn)
        self._num_bytes += turn.num_bytes

    def _add_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._tree.add(turn)
        self._num_bytes += turn.num_bytes
        answer = comparable_answer(turn.message)
        for spelling in (answer, without_ids(answer)):
            self._answers[extend_chain(turn.prompt.chain, spelling)] = turn
        if turn.prompt.continues is not None:
            turn.prompt.continues.has_continuation = True

    def _add_prompt(
        self,
        encoded: Encoded,
        continues: Turn | None,
        messages: list[Message],
        num_messages: int,
        chain: bytes,
        reason: str | None,
        forced: str = "",
        opening: Sequence[bytes] = (),
        tools: bytes = b"",
        num_bytes: int = 0,
    ) -> Prompt:
        position, ids = self._tree.follow(encoded.position, encoded.ids)
        prompt = Prompt(
            position.node,
            position.offset,
            ids.copy(),
            continues,
            messages,
            num_messages,
            chain,
            len(self.prompts),
            encoded.rendered,
            encoded.boundary,
            reason,
            forced,
            opening,
            continues.prompt.tools if continues is not None else tools,
            path_buffers=self._path_buffers,
        )
        self._register_prompt(prompt, num_bytes)
        return prompt

    def _register_prompt(self, prompt: Prompt, num_bytes: int) -> None:
        """`num_bytes`: memory of its messages."""
        self.prompts.append(prompt)
        self._prompts[prompt.chain, prompt.forced] = prompt
        self._openings.update(prompt.opening)
        self._tree.add(prompt)
        self.images.register(prompt.messages)
        tools = prompt.tools if prompt.continues is None else b""
        self._num_bytes += PROMPT_BYTES + prompt.ids.nbytes + len(tools) + num_bytes

    def _find_longest_match(self, keys: list[bytes]) -> Turn | None:
        """The deepest recorded turn whose conversation these keys begin with."""
        answers = (self._answers.get(keys[i]) for i in range(len(keys) - 1, 0, -1))
        return next((turn for turn in answers if turn is not None), None)
