"""One session: which recorded turn a request extends, what it adds, and what was sampled for it.

Recorded ids are always reused; only what follows them is rendered and encoded. The tokens
themselves are in tree.py.
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

from sf_core.dataplane.bodies import RewardBody
from sf_core.dataplane.chat.messages import Message, as_said, extend_chain, size_of, without_ids
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.claims import Claim, is_external
from sf_core.dataplane.sessions.encoding import Draft, Encoded, render_request
from sf_core.dataplane.sessions.identity import Conversation, Conversations
from sf_core.dataplane.sessions.memory import size_of_judgement
from sf_core.dataplane.sessions.pictures import Pictures
from sf_core.dataplane.sessions.tree import (
    NO_TEXT,
    SAMPLED_BYTES,
    Prompt,
    Tapes,
    TokenTree,
    TreePosition,
    Turn,
    branch_reason,
    branch_reason_of_ids,
    find_repeated,
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
    """None for a session that is of no group."""
    runner: str = ""
    began_at: float = float("inf")
    """When its time began, on the run's serving clock; infinity while it has no limit there."""
    floor: int = 0
    """Oldest policy version that may answer its requests."""
    group: str | None = None
    by_operator: bool = False
    """Whether the operator opened it: no client may read, reward or finish it then."""
    task_id: str = ""
    environment: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Free-form values given when the session was opened."""
    answer: str | None = None
    """The agent's answer as JSON, from the end of the agent until another runner has scored it."""
    waits_for_group: bool = False
    """Its answer is scored together with those of its group, of which some are missing."""
    scoring: str = ""
    """Names the claim of its answer by the runner that scores it; empty while none does."""
    num_unjudged: int = 0
    """How often its answer could not be judged."""
    judgements: list[Judgement] = field(default_factory=list)
    """What judges were asked then."""
    output: str | None = None
    """What the agent's process wrote, likewise."""
    earned: RewardBody | None = None
    """The reward that it was given before its end."""
    report: str = ""
    """Digest of the report that ends it; empty until then, and if its time ends it."""
    started_at: float = field(default_factory=time.time)
    prompts: list[Prompt] = field(default_factory=list)
    """Prompts in the order of their first requests."""
    turns: list[Turn] = field(default_factory=list)
    abandoned: list[Turn] = field(default_factory=list)
    """Turns whose answer was not delivered, as far as they were sampled. Never trained on."""
    recorded: list[RecordedTurn] = field(default_factory=list)
    """Turns that are not in flight and whose request may be retried: no later turn extends them."""
    running: set[Generation] = field(default_factory=set)
    has_overflowed: bool = False
    """No turn was begun since a request did not fit into the context window."""
    branch_reasons: Counter[str] = field(default_factory=Counter)
    pictures: Pictures = field(default_factory=Pictures)
    _tree: TokenTree = field(default_factory=TokenTree)
    _tapes: Tapes = field(default_factory=Tapes)
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
        """Whether no runner works on it: its agent came by itself."""
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
        """The prompt of a request that was asked before, else what makes it one. Nothing is encoded. One
        request of the session at a time may be drafted, in any thread. Raises jinja2.TemplateError."""
        conversation = self._conversations.recall(tools, messages, self._answers, renderer.options)
        keys = conversation.keys
        if (prompt := self._prompts.get((keys[-1], forced))) is not None:
            return prompt
        matched = self._longest_match(keys)
        num_matched = matched.prompt.num_messages + 1 if matched else 0
        if matched is not None:
            conversation.hold_once(matched)
        try:
            unencoded = render_request(conversation, matched, tools, renderer, self.pictures)
        except Exception:
            self.discard(conversation)
            raise
        added = conversation.messages[num_matched:]
        shown = b"" if matched or not tools else msgspec.json.encode(tools)
        return Draft(conversation, matched, added, unencoded, forced, shown, sum(map(size_of, added)))

    def add(self, draft: Draft, encoded: Encoded) -> Prompt:
        """The prompt of a draft."""
        conversation = draft.conversation
        matched = draft.matched
        keys = conversation.keys
        reason = None
        if self._prompts:
            reason = branch_reason(encoded.place, matched, draft.messages, keys, self._openings)
        return self._add_prompt(
            *(encoded, matched, draft.messages, len(conversation.messages), keys[-1], reason, draft.forced),
            opening=() if matched else keys[:2],
            tools=draft.tools,
            num_bytes=draft.num_bytes,
        )

    def discard(self, conversation: Conversation) -> None:
        """Hold nothing of a request that is refused."""
        self._conversations.forget(conversation)

    def open_ids(self, ids: Sequence[int] | Ids) -> Prompt:
        """The prompt of these ids, new or asked before; its beginning is shared with lines that have it."""
        array = np.asarray(ids, dtype=np.int32)
        chain = blake2b(array.tobytes(), digest_size=16, person=b"ids").digest()
        prompt = self._prompts.get((chain, ""))
        if prompt is None:
            tip = find_repeated(self.turns, self._tapes, array)
            place = TreePosition(tip, tip.end if tip else 0)
            place, rest = self._tree.follow(place, array[place.at :])
            encoded = Encoded(place, rest, NO_TEXT, None)
            continues = last_whole_turn(place)
            reason = branch_reason_of_ids(place) if self._prompts else None
            prompt = self._add_prompt(encoded, continues, [], 0, chain, reason)
        return prompt

    def begin_sample(self, prompt: Prompt, nth: int) -> int:
        """Count a turn begun from this prompt; returns its number among the prompt's turns. `nth` is its
        index in its request."""
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
        turn = Turn.of(generation, prompt, sample, message, reason, num_unparsed_calls, index)
        self._add_turn(turn)
        return turn

    def abandon(self, generation: Generation, prompt: Prompt, sample: int, message: Message) -> Turn:
        """Record what was sampled of a turn that no client waits for any more."""
        turn = Turn.of(generation, prompt, sample, message, FinishReason.ABORT, 0, len(self.abandoned))
        self._add_abandoned(turn)
        return turn

    def forget_answered(self, prompt: Prompt, identity: bytes) -> None:
        """Forget recorded turns that are not asked again, now that a request of this identity has asked
        `prompt`."""
        self.recorded = [known for known in self.recorded if known.may_be_asked_again(prompt, identity)]

    def set_aside_unanswered(self, in_flight: Iterable[RecordedTurn] = ()) -> int:
        """When the session ends, move turns with undelivered answers to the abandoned ones: only delivered
        answers are trained on. Answers that a restart found count as delivered. Returns the number moved."""
        known = [*in_flight, *self.recorded]
        unanswered = {recorded.turn for recorded in known if recorded.is_unanswered}
        aside = [turn for turn in self.turns if turn in unanswered]
        self.turns = [turn for turn in self.turns if turn not in unanswered]
        self.abandoned += aside
        return len(aside)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished turns: a retry continues them, the end of the session abandons them."""
        return sum(recorded.turn is None for recorded in self.recorded)

    def take_unrecorded(self) -> list[Prompt]:
        """Prompts opened since the last call, for the journal."""
        start = self._num_recorded
        self._num_recorded = len(self.prompts)
        return self.prompts[start:]

    def apply(self, event: TurnEvent) -> None:
        """Do what an event did, after a restart. Those of one turn come in order, those of several may
        interleave."""
        if isinstance(event, Overflowed):
            self.has_overflowed = True
            return
        if isinstance(event, Begun):
            return self._apply_begin(event)
        recorded = next((known for known in reversed(self.recorded) if known.key == event.key), None)
        if recorded is None:
            return  # a later turn extended it before its delivery was written
        match event:
            case Sampled():
                recorded.engines = event.engines
                recorded.chunks.append(event.tokens)
            case TurnEnded():
                self._apply_end(event, recorded)
            case Delivered():
                recorded.delivered = True

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled in it so far, those of turns that were not delivered left out."""
        done = sum(len(turn.ids) for turn in self.turns)
        return done + sum(len(generation.token_ids) for generation in self.running)

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes; takes no longer than what each request does anyway."""
        parts = self.earned.reward_parts if self.earned else ()
        texts = [self.group, self.task_id, self.environment, self.answer, self.output, *parts]
        num_bytes = SESSION_BYTES + size_of(self.metadata) + size_of(texts)
        num_bytes += self._num_bytes
        num_bytes += self._tapes.num_bytes + self._conversations.num_bytes + self.pictures.num_bytes
        num_bytes += sum(map(size_of_judgement, self.judgements))
        for recorded in self.recorded:
            if recorded.turn is None:
                num_bytes += SAMPLED_BYTES * len(recorded.tokens.ids)
        return num_bytes

    def release(self) -> None:
        """Part prompts and tapes, so that their memory is free as soon as nobody holds the session."""
        self._tapes.clear()

    def _apply_begin(self, event: Begun) -> None:
        for new in event.prompts:
            prompt = new.resolve(self.prompts, self.turns)
            prompt.tapes = self._tapes
            self._take_prompt(prompt, sum(map(size_of, prompt.messages)))
            self.take_unrecorded()
        prompt = self.prompts[event.key.prompt]
        self.begin_sample(prompt, event.nth)
        self.forget_answered(prompt, event.identity)
        self.recorded.append(RecordedTurn(event.key, event.identity, prompt))

    def _apply_end(self, event: TurnEnded, recorded: RecordedTurn) -> None:
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
        answer = as_said(turn.message)
        for said in (answer, without_ids(answer)):
            self._answers[extend_chain(turn.prompt.chain, said)] = turn
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
        place, ids = self._tree.follow(encoded.place, encoded.ids)
        prompt = Prompt(
            place.node,
            place.at,
            ids.copy(),
            continues,
            messages,
            num_messages,
            chain,
            len(self.prompts),
            encoded.text,
            encoded.seam,
            reason,
            forced,
            opening,
            continues.prompt.tools if continues is not None else tools,
            tapes=self._tapes,
        )
        self._take_prompt(prompt, num_bytes)
        return prompt

    def _take_prompt(self, prompt: Prompt, num_bytes: int) -> None:
        """`num_bytes`: memory of its messages."""
        self.prompts.append(prompt)
        self._prompts[prompt.chain, prompt.forced] = prompt
        self._openings.update(prompt.opening)
        self._tree.add(prompt)
        self.pictures.note(prompt.messages)
        tools = prompt.tools if prompt.continues is None else b""
        self._num_bytes += PROMPT_BYTES + prompt.ids.nbytes + len(tools) + num_bytes

    def _longest_match(self, keys: list[bytes]) -> Turn | None:
        """The deepest recorded turn with whose conversation this one begins."""
        answers = (self._answers.get(keys[i]) for i in range(len(keys) - 1, 0, -1))
        return next((turn for turn in answers if turn is not None), None)
