"""Serves one turn: a canonical request becomes a generation, its tokens become an answer piece by piece.

Owns what the agent sees of a turn and when the turn is recorded: before its end is forwarded. Knows no HTTP.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import blake2b

import jinja2

from sf_core.dataplane.chat.answer_grammar import answer_grammar
from sf_core.dataplane.chat.answer_parser import (
    THINK_END,
    THINK_START,
    AnswerParts,
    AnswerStream,
    ReasoningSplitter,
    StopStrings,
)
from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.messages import Message, assistant_message, call_id
from sf_core.dataplane.chat.renderer import Renderer, TextStream
from sf_core.dataplane.chat.tool_formats import ToolCall, name_of
from sf_core.dataplane.errors import ApiError, ContextOverflow
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.session import Prompt, Session, Turn
from sf_core.dataplane.sessions.turn_events import RecordedTurn, Tokens, TurnKey
from sf_core.dataplane.turns.answer import Answer, Event, MadeCall, Pieces, TokenLogprob, encode_arguments
from sf_core.dataplane.turns.host import TurnHost
from sf_core.dataplane.turns.request import TurnRequest
from sf_core.types import FinishReason, GenerationRequest, Sampling

NO_FORMAT = (
    "The policy cannot call tools: its chat template writes calls in no known format. Put `tool_format` into "
    f"its tokenizer_config.json (known: {', '.join(FORMATS)}), or take a template that writes calls."
)

_request_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request whose prompt is in the session; its turns can be begun."""

    run: TurnHost
    session: Session
    request: TurnRequest
    prompt: Prompt
    prompt_ids: array[int]
    grammar: str
    """What its answers follow; empty: nothing."""

    def begin(self, nth: int, recorded: RecordedTurn | None) -> TurnService:
        """Begin the request's `nth` sample, or continue the recorded one."""
        if recorded is None or recorded.prompt is self.prompt:
            prompt, prompt_ids = self.prompt, self.prompt_ids
        else:  # the client's key says that it is the same request
            prompt, prompt_ids = recorded.prompt, recorded.prompt.full_ids()
        return TurnService(
            self.run, self.session, self.request, prompt, prompt_ids, self.grammar, nth, recorded
        )


def open_request(run: TurnHost, session: Session, request: TurnRequest) -> OpenRequest:
    """Put a request's prompt into the session. Raises ApiError if it cannot become a turn."""
    _check_tools(run, request)
    grammar = _grammar(run, request)
    prompt = _open_prompt(run, session, request)
    prompt_ids = prompt.full_ids()
    if len(prompt_ids) >= run.spec.context_length:
        raise ContextOverflow(len(prompt_ids), run.spec.context_length)
    return OpenRequest(run, session, request, prompt, prompt_ids, grammar)


def count_tokens(run: TurnHost, request: TurnRequest) -> int:
    """Number of tokens of a request's prompt, rendered without recorded turns. Raises ApiError."""
    _check_tools(run, request)
    return len(_open_prompt(run, Session("count"), request).ids)


class TurnService:
    """One sample of a request. `recorded` is what was recorded of it before, from which the turn goes on."""

    def __init__(
        self,
        run: TurnHost,
        session: Session,
        request: TurnRequest,
        prompt: Prompt,
        prompt_ids: array[int],
        grammar: str,
        nth: int,
        recorded: RecordedTurn | None = None,
    ) -> None:
        """`nth` is the index of the sample in its request."""
        self._run, self._session, self._request = run, session, request
        self.prompt, self.nth = prompt, nth
        self.turn: Turn | None = recorded.turn if recorded else None
        """The turn in the session; None until it is over."""
        self.is_put_off = False
        """Whether it was refused for now; a retry of its request continues it."""
        sample = recorded.key.sample if recorded else session.begin_sample(prompt, nth)
        self.key = TurnKey(session.session_id, prompt.index, sample)
        self.turn_id = session.turn_id(prompt, sample)
        self._stops = StopStrings(request.stop)
        renderer = run.renderer.with_options(request.template_options)
        self._answer, marks = _answer_stream(renderer, request, prompt.forced)
        self._text = TextStream(run.renderer, marks)
        self._num_calls = 0
        self._forced: AnswerParts = self._answer.push(prompt.forced.removeprefix(_AFTER_THINKING))
        self._num_read = 0
        self._logprobs: list[TokenLogprob] | None = [] if request.logprobs else None
        """Log-probs of the tokens read; None if the request did not ask for them."""
        self._inside = b""
        """The bytes of a character whose last token has not come yet."""
        self._ends_early = bool(request.stop) or (request.calls_tools and not request.tool_choice.parallel)
        """Whether the turn may end before the engine ends it, so that tokens are read one by one."""
        self._generation = Generation(
            GenerationRequest(
                f"{next(_request_numbers)}",
                prompt_ids,
                0,
                min(run.spec.context_length - len(prompt_ids), self._budget()),
                run.renderer.stop_token_ids,
                self._sampling(sample, nth),
                request.stream or self._ends_early,
                grammar,
            ),
            floor=max(prompt.version, session.floor),
        )
        self._generation.session_id = session.session_id
        self._generation.pace = run.pace
        if (before := prompt.continues) is not None:
            self._generation.comes_after(before.engine.split(",")[-1], prompt.version, prompt.start)
        claim = session.claim
        if claim is not None:
            self._generation.on_start = lambda version: run.note_started(claim, version)
        if recorded is not None:
            recorded.restore(self._generation)

    @property
    def is_over(self) -> bool:
        return self._generation.finish_reason is not None

    @property
    def is_cancelled(self) -> bool:
        return self._generation.cancelled is not None

    @property
    def num_read(self) -> int:
        """Number of tokens that `pieces` has read so far."""
        return self._num_read

    @property
    def engines(self) -> str:
        return ",".join(self._generation.engines)

    def tokens_since(self, start: int) -> Tokens:
        """Tokens that `pieces` has read, from `start` on."""
        generation, end = self._generation, self._num_read
        return Tokens.of(
            generation.token_ids[start:end], generation.logprobs[start:end], generation.versions[start:end]
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._generation.request.prompt_ids)

    async def pieces(self) -> AsyncIterator[Pieces]:
        """The parts of the answer as they become final. After the last one the turn is in the session."""
        generation = self._generation
        self._session.running.add(generation)
        if generation.finish_reason is None:
            self._run.router.submit(generation)
        try:
            is_last = False
            while not is_last:
                await generation.progress(self._num_read)
                if generation.cancelled is not None:
                    raise ApiError(
                        410, f"This request was ended: {generation.cancelled}.", code="session_over"
                    )
                pieces, is_last = self._read(), generation.finish_reason is not None
                yield pieces
        finally:
            self._session.running.discard(generation)
            if generation.finish_reason is None and not self._put_off():
                self._abandon()
        if self.turn is None:
            unparsed = self._answer.num_unparsed
            self.turn = self._session.commit(
                generation, self.prompt, self.key.sample, self._message(), unparsed
            )
            self._run.count("unparsed_calls", unparsed)
            if self.turn.constrained:
                self._run.count("constrained_turns")

    def answer(self) -> Answer:
        """The whole answer, once there are no more pieces."""
        generation = self._generation
        assert generation.finish_reason is not None and self.turn is not None
        called = bool(self._answer.calls) and generation.finish_reason is FinishReason.STOP
        return Answer(
            self.turn_id,
            self.turn.message,
            "tool_calls" if called else generation.finish_reason.value,
            self._stops.found,
            len(generation.request.prompt_ids),
            len(generation.token_ids),
            self._logprobs,
        )

    def cancel(self) -> None:
        """The client went away: stop sampling. What was sampled so far is not trained on."""
        self._run.router.cancel(self._generation, "the client went away")

    def _read(self) -> Pieces:
        """Read new tokens; at a stop string, or after the only call allowed, the turn ends with the token
        that completes it."""
        generation, start = self._generation, self._num_read
        new = generation.token_ids[start:].tolist()
        parts, self._forced = self._forced, []
        if not self._ends_early:
            self._num_read += len(new)
            parts += self._answer.push(self._text.push(self._visible(new)))
        for token in new if self._ends_early else ():
            self._num_read += 1
            parts += self._answer.push(self._stops.push(self._text.push(self._visible([token]))))
            if self._is_at_end():
                self._run.router.stop(generation)
                generation.end_at(self._num_read)
                break
        if generation.finish_reason is not None:
            if not self._stops.found:
                rest = self._stops.push(self._text.flush())
                parts += self._answer.push(rest + self._stops.flush())
            parts += self._answer.finish()
        return Pieces([self._event(part) for part in parts], self._read_logprobs(start))

    def _is_at_end(self) -> bool:
        one_call = not self._request.tool_choice.parallel and len(self._answer.calls) > 0
        return self._stops.found is not None or one_call

    def _event(self, part: str | ToolCall | Event) -> Event:
        if not isinstance(part, ToolCall):
            return part
        self._num_calls += 1
        made = call_id(self.turn_id, self._num_calls - 1)
        return MadeCall(made, part.name, encode_arguments(part.arguments))

    def _visible(self, ids: list[int]) -> list[int]:
        stops = self._run.renderer.stop_texts
        return ids if stops.keys().isdisjoint(ids) else [token for token in ids if token not in stops]

    def _read_logprobs(self, start: int) -> list[TokenLogprob] | None:
        if self._logprobs is None:
            return None
        generation, end, renderer = self._generation, self._num_read, self._run.renderer
        ids, logprobs = generation.token_ids[start:end].tolist(), generation.logprobs[start:end].tolist()
        pieces = renderer.token_bytes(ids)
        if start == 0 and pieces:
            # the text of an answer has no spaces where SentencePiece marks that it begins with a word
            shown = renderer.shown(ids[:1]).encode()
            if pieces[0].lstrip(b" ") == shown.lstrip(b" "):
                pieces[0] = shown
        new = [
            TokenLogprob(self._complete(piece), piece, logprob)
            for piece, logprob in zip(pieces, logprobs, strict=True)
        ]
        self._logprobs += new
        return new

    def _complete(self, piece: bytes) -> str:
        """The text of a token, and of those before it that end inside a character; empty if it does too."""
        self._inside += piece
        text = self._inside.decode(errors="replace")
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._inside = b""
        return text

    def _put_off(self) -> bool:
        refusal = self._generation.refusal
        is_for_now = refusal is not None and refusal.retry_after_s is not None
        # a retry cannot name a session that is not among the run's
        if is_for_now and self._run.sessions.get(self._session.session_id) is self._session:
            if not self._ends_early:
                self._num_read = len(self._generation.token_ids)
            self.is_put_off = True
        return self.is_put_off

    def _abandon(self) -> None:
        self._run.router.cancel(self._generation, "the client went away")
        self._run.count("abandoned_turns")
        self.turn = self._session.abandon(self._generation, self.prompt, self.key.sample, self._message())

    def _message(self) -> Message:
        answer = self._answer
        return assistant_message(answer.content, answer.calls, self.turn_id, answer.reasoning)

    def _budget(self) -> int:
        asked = self._request.max_tokens
        if self._session.claim is None:
            return asked or self._run.spec.context_length
        most = self._run.spec.rollout.turn_tokens
        return min(asked or most, most)

    def _sampling(self, sample: int, nth: int) -> Sampling:
        """The run's settings in its sessions, whatever the agent asks; else the request's."""
        spec, request, claim = self._run.spec, self._request, self._session.claim
        if claim is None:
            seed = secrets.randbits(64) if request.seed is None else (request.seed + nth) % 2**64
            return Sampling(request.temperature, request.top_p, request.top_k, seed)
        seed = turn_seed(spec.seed, claim.place, self.prompt.index, sample, claim.draw)
        return Sampling(spec.rollout.temperature, spec.rollout.top_p, spec.rollout.top_k, seed)


def _check_tools(run: TurnHost, request: TurnRequest) -> None:
    """Raises ApiError if the request has tools to call and calls cannot be read."""
    if request.calls_tools and not run.renderer.tool_format:
        raise ApiError(400, NO_FORMAT, param="tools")


def _grammar(run: TurnHost, request: TurnRequest) -> str:
    if request.schema is None or request.tool_choice.kind == "required":
        return ""
    renderer = run.renderer.with_options(request.template_options)
    return answer_grammar(request.schema, request.tools if request.calls_tools else [], renderer)


def _open_prompt(run: TurnHost, session: Session, request: TurnRequest) -> Prompt:
    if request.text_or_ids is not None:
        return session.open_ids(_given_ids(run.renderer, request.text_or_ids))
    try:
        renderer = run.renderer.with_options(request.template_options)
        forced = _forced_text(request, renderer)
        messages = request.messages
        if request.merges_system:
            messages = renderer.merge_late_system(messages)
        return session.open_prompt(messages, request.tools, renderer, forced)
    except jinja2.TemplateError as error:
        raise ApiError(400, f"The chat template refuses these messages: {error}", param="messages") from None


def _given_ids(renderer: Renderer, given: str | list[int]) -> list[int]:
    ids = renderer.encode(given).tolist() if isinstance(given, str) else given
    if not 0 <= min(ids) <= max(ids) < renderer.vocab_size:
        raise ApiError(400, f"Token ids must be from 0 to {renderer.vocab_size - 1}.", param="prompt")
    return ids


_AFTER_THINKING = f"\n{THINK_END}\n\n"


def _forced_text(request: TurnRequest, renderer: Renderer) -> str:
    """The beginning of an answer that must call a tool; empty if it need not."""
    choice = request.tool_choice
    if choice.kind != "required":
        return ""
    tool = next((tool for tool in request.tools if name_of(tool) == choice.name), None)
    opening = FORMATS[renderer.tool_format].opening(tool)
    return (_AFTER_THINKING if renderer.opens_thinking else "") + opening


def _answer_stream(
    renderer: Renderer, request: TurnRequest, forced: str
) -> tuple[AnswerStream, tuple[str, ...]]:
    """What reads the answer, and the marks that it must see."""
    form = FORMATS[renderer.tool_format] if request.calls_tools else None
    splitter, marks = (form.splitter(request.tools), form.marks) if form else (None, ())
    if not (renderer.thinks and request.text_or_ids is None) or forced:
        return AnswerStream(splitter), marks
    reasoning = ReasoningSplitter(renderer.opens_thinking, marks[:1])
    return AnswerStream(splitter, reasoning), (THINK_START, THINK_END, *marks)


def turn_seed(
    run_seed: int, place: tuple[str | int, ...], prompt_index: int, sample: int, draw: int = 0
) -> int:
    """Unsigned 64-bit key of a turn. It depends on the `draw` of the session's claim, not on its attempt: a
    session given out again because its runner was lost samples the same."""
    key = (run_seed, *place, prompt_index, sample, *([draw] if draw else []))
    text = ".".join(map(str, key))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
