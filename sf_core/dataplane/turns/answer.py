"""A turn's answer in the form that dialects get: in pieces while it is sampled, and whole at its end. The
reader makes the parts of an answer of sampled tokens, and ends the generation where its request says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sf_core.dataplane.chat.answer_parser import (
    THINK_END,
    THINK_START,
    AnswerParts,
    AnswerStream,
    Reasoning,
    ReasoningSplitter,
    StopStrings,
)
from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.messages import Message, assistant_message, call_id
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import CallSplitter, ToolCall
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.turns.request import TurnRequest


class MadeCall(NamedTuple):
    """A tool call of an answer."""

    call_id: str
    name: str
    arguments: str
    """A JSON object."""


class TokenLogprob(NamedTuple):
    text: str
    """Text of the token, and of the tokens before it that end inside a character; empty if this token does
    too."""
    data: bytes
    """The token's own bytes."""
    logprob: float
    """Natural log."""


Event = str | Reasoning | MadeCall
"""A piece of content, a piece of reasoning, or a whole call."""


class Pieces(NamedTuple):
    """The parts of an answer that became final since the last pieces."""

    events: list[Event]
    logprobs: list[TokenLogprob] | None
    """Log-probs of the tokens sampled since; None if the request did not ask for them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn."""

    turn_id: str
    message: Message
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop: str | None
    """The stop string that ended the answer; None if none did."""
    num_prompt_tokens: int
    num_sampled_tokens: int
    logprobs: list[TokenLogprob] | None

    @property
    def reasoning(self) -> str:
        return str(self.message.get("reasoning_content", ""))

    @property
    def content(self) -> str:
        return str(self.message["content"])

    @property
    def calls(self) -> list[MadeCall]:
        return [
            MadeCall(call["id"], call["function"]["name"], encode_arguments(call["function"]["arguments"]))
            for call in self.message.get("tool_calls", [])
        ]


def encode_arguments(arguments: dict[str, object]) -> str:
    return msgspec.json.encode(arguments).decode()


AFTER_THINKING = f"\n{THINK_END}\n\n"
"""Text before a forced beginning, if the template opens a thought."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class AnswerReader:
    def __init__(self, renderer: Renderer, request: TurnRequest, forced: str, turn_id: str) -> None:
        """`renderer` has the request's template options. `forced` is the beginning of the answer that the
        prompt ends with."""
        self._renderer = renderer
        self._turn_id = turn_id
        self.num_read = 0
        """Number of tokens read."""
        self.stops = StopStrings(request.stop)
        self._has_one_call = request.calls_tools and not request.tool_choice.parallel
        self.reads_singly = bool(request.stop) or self._has_one_call
        """Whether the answer may end before the engine ends it, so that tokens are read one by one."""
        self.logprobs: list[TokenLogprob] | None = [] if request.logprobs else None
        """Log-probs of the tokens read; None if the request did not ask for them."""
        self.answer, marks = _make_answer_stream(renderer, request, forced)
        self._text = TextStream(renderer, marks)
        self._forced_parts: AnswerParts = self.answer.push(forced.removeprefix(AFTER_THINKING))
        self._num_calls = 0
        self._incomplete = b""
        """The first bytes of a character whose last token has not been sampled so far."""

    @property
    def is_at_end(self) -> bool:
        """Whether a stop string was read, or the only call that is allowed."""
        return self.stops.found is not None or (self._has_one_call and bool(self.answer.calls))

    def make_message(self) -> Message:
        """The answer so far as a message."""
        answer = self.answer
        return assistant_message(answer.content, answer.calls, self._turn_id, answer.reasoning)

    def read(self, generation: Generation) -> Pieces:
        """Read new tokens; at a stop string, or after the only call allowed, the generation ends with the
        token that completes it."""
        start = self.num_read
        new_ids = generation.token_ids[start:].tolist()
        parts = self._forced_parts
        self._forced_parts = []
        if not self.reads_singly:
            self.num_read += len(new_ids)
            parts += self.answer.push(self._text.push(self._without_stops(new_ids)))
        for token in new_ids if self.reads_singly else ():
            self.num_read += 1
            parts += self.answer.push(self.stops.push(self._text.push(self._without_stops([token]))))
            if self.is_at_end:
                generation.end_at(self.num_read)
                break
        if generation.finish_reason is not None:
            if not self.stops.found:
                last_text = self.stops.push(self._text.flush())
                parts += self.answer.push(last_text + self.stops.flush())
            parts += self.answer.finish()
        return Pieces([self._to_event(part) for part in parts], self._read_logprobs(generation, start))

    def _to_event(self, part: str | ToolCall | Event) -> Event:
        if not isinstance(part, ToolCall):
            return part
        self._num_calls += 1
        new_id = call_id(self._turn_id, self._num_calls - 1)
        return MadeCall(new_id, part.name, encode_arguments(part.arguments))

    def _without_stops(self, ids: list[int]) -> list[int]:
        stops = self._renderer.stop_texts
        return ids if stops.keys().isdisjoint(ids) else [token for token in ids if token not in stops]

    def _read_logprobs(self, generation: Generation, start: int) -> list[TokenLogprob] | None:
        if self.logprobs is None:
            return None
        end = self.num_read
        renderer = self._renderer
        ids = generation.token_ids[start:end].tolist()
        logprobs = generation.logprobs[start:end].tolist()
        pieces = renderer.token_bytes(ids)
        if start == 0 and pieces:
            # SentencePiece marks the beginning of a word by a space, which the text of an answer lacks
            first = renderer.decode_with_special(ids[:1]).encode()
            if pieces[0].lstrip(b" ") == first.lstrip(b" "):
                pieces[0] = first
        new = [
            TokenLogprob(self._decode_piece(piece), piece, logprob)
            for piece, logprob in zip(pieces, logprobs, strict=True)
        ]
        self.logprobs += new
        return new

    def _decode_piece(self, piece: bytes) -> str:
        """The text of a token, and of the tokens before it that end inside a character; empty if this token
        does too."""
        self._incomplete += piece
        text = self._incomplete.decode(errors="replace")
        if text.endswith(_REPLACEMENT):
            return ""
        self._incomplete = b""
        return text


class TextStream:
    """Decodes ids piece by piece. A piece is held back while it ends inside a character."""

    def __init__(self, renderer: Renderer, marks: Iterable[str] = ()) -> None:
        """`marks` are shown although they are special tokens."""
        self._decode = renderer.decoder(marks)
        self._ids: list[int] = []
        self._start = 0
        """Index from which ids are decoded: one piece back, because a decoder may look at the token
        before."""
        self._num_decoded = 0
        """Number of ids whose text was returned."""

    def push(self, ids: list[int]) -> str:
        self._ids += ids
        before = self._decode(self._ids[self._start : self._num_decoded])
        text = self._decode(self._ids[self._start :])
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            return ""
        self._start = self._num_decoded
        self._num_decoded = len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._ids[self._start : self._num_decoded])
        return self._decode(self._ids[self._start :])[len(before) :]


def _make_answer_stream(
    renderer: Renderer, request: TurnRequest, forced: str
) -> tuple[AnswerStream, tuple[str, ...]]:
    """The parser of the answer, and the special tokens that it must be shown."""
    splitter: CallSplitter | None = None
    marks: tuple[str, ...] = ()
    if request.calls_tools:
        form = FORMATS[renderer.tool_format]
        splitter = form.splitter(request.tools)
        marks = form.marks
    has_messages = request.text_or_ids is None
    may_reason = renderer.thinks and has_messages and not forced
    if not may_reason:
        return AnswerStream(splitter), marks
    reasoning = ReasoningSplitter(renderer.opens_thinking, marks[:1])
    return AnswerStream(splitter, reasoning), (THINK_START, THINK_END, *marks)
