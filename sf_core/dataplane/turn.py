"""Serving one turn: a canonical request becomes a generation, its tokens become an answer piece by piece.

Owns what the agent sees of a turn and when the turn is recorded: before its end is forwarded. Knows no HTTP.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator
from typing import Any

import jinja2

from sf_core.dataplane.chat_request import ChatRequest
from sf_core.dataplane.chat_response import Answer, token_logprobs
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.generation import Generation
from sf_core.dataplane.messages import assistant_message, call_id, tool_call
from sf_core.dataplane.rendering import TextStream
from sf_core.dataplane.run import Run
from sf_core.dataplane.session import Prompt, Session, Turn, turn_seed
from sf_core.dataplane.toolcalls import AnswerStream, StopStrings, ToolCall
from sf_core.dataplane.turn_records import RecordedTurn, Tokens, TurnKey
from sf_core.types import FinishReason, Sampling

_request_numbers = itertools.count()

Pieces = tuple[list[str | ToolCall], list[dict[str, Any]] | None]
"""Content and calls that became certain, and the log-probs of the tokens since the last pieces, if asked."""


class TurnService:
    """Raises ApiError if the request cannot become a turn. `recorded` is what an earlier process recorded of
    the same request: the turn goes on from there."""

    def __init__(
        self, run: Run, session: Session, request: ChatRequest, recorded: RecordedTurn | None = None
    ) -> None:
        self._run, self._session, self._request = run, session, request
        self.turn: Turn | None = recorded.turn if recorded else None
        """As it is in the session, once it is over."""
        self._prompt = recorded.prompt if recorded else self._open_prompt()
        prompt_ids = self._prompt.full_ids()
        room = run.spec.context_length - len(prompt_ids)
        if room < 1:
            raise ApiError(
                400,
                f"The prompt has {len(prompt_ids)} tokens; the context window holds "
                f"{run.spec.context_length}, at least one of them for the answer.",
                code="context_length_exceeded",
                param="messages",
            )
        if recorded is None:
            sample = self._prompt.num_samples
            self._prompt.num_samples += 1
        else:
            sample = recorded.key.sample
        self.key = TurnKey(session.session_id, self._prompt.index, sample)
        self.turn_id = f"{session.session_id}.{self._prompt.index}.{sample}"
        self._text = TextStream(run.renderer)
        self._stops = StopStrings(request.stop)
        self._answer = AnswerStream(
            request.tools if request.parse_tool_calls else [], run.renderer.tool_format
        )
        self._num_read = 0
        self._generation = Generation(
            f"{next(_request_numbers)}",
            prompt_ids,
            self._sampling(sample),
            min(room, self._budget()),
            run.renderer.stop_token_ids,
            stream=request.stream or bool(request.stop),
            floor=max(self._prompt.version, session.floor),
        )
        claim = session.claim
        if claim is not None:
            self._generation.on_start = lambda version: run.manager.note_started(claim, version)
        if recorded is not None:
            recorded.restore(self._generation)

    @property
    def prompt(self) -> Prompt:
        return self._prompt

    @property
    def is_over(self) -> bool:
        return self._generation.finish_reason is not None

    @property
    def num_read(self) -> int:
        """Tokens that `pieces` has told of so far."""
        return self._num_read

    @property
    def engines(self) -> str:
        return ",".join(self._generation.engines)

    def tokens_since(self, start: int) -> Tokens:
        """Those that `pieces` has told of."""
        generation, end = self._generation, self._num_read
        return Tokens.of(
            generation.token_ids[start:end], generation.logprobs[start:end], generation.versions[start:end]
        )

    async def pieces(self) -> AsyncIterator[Pieces]:
        """What becomes certain of the answer, as it does. After the last piece the turn is recorded."""
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
            if generation.finish_reason is None:
                self._abandon()
        self._message = assistant_message(self._answer.content, self._answer.calls, self.turn_id)
        if self.turn is None:
            self.turn = self._session.commit(
                generation, self._prompt, self._message, self._answer.num_unparsed
            )
        self._run.counters["unparsed_calls"] += self._answer.num_unparsed

    def answer(self) -> Answer:
        """The whole answer, once there are no more pieces."""
        generation = self._generation
        assert generation.finish_reason is not None
        called = bool(self._answer.calls) and generation.finish_reason is FinishReason.STOP
        return Answer(
            self._message,
            "tool_calls" if called else generation.finish_reason.value,
            len(generation.prompt_ids),
            len(generation.token_ids),
            self._logprobs(0),
        )

    def call(self, call: ToolCall, index: int) -> dict[str, Any]:
        """A call of this turn as its message will have it."""
        return tool_call(call_id(self.turn_id, index), call.name, call.arguments)

    def cancel(self) -> None:
        """The client went away: stop sampling. What was sampled so far is not trained on."""
        self._run.router.cancel(self._generation, "the client went away")

    def _read(self) -> Pieces:
        """Take in new tokens; at a stop string the turn ends with the token that completes it."""
        generation, start = self._generation, self._num_read
        new = generation.token_ids[start:].tolist()
        events: list[str | ToolCall] = []
        if not self._request.stop:
            self._num_read += len(new)
            events += self._answer.push(self._text.push(self._visible(new)))
        for token in new if self._request.stop else ():
            self._num_read += 1
            events += self._answer.push(self._stops.push(self._text.push(self._visible([token]))))
            if self._stops.found:
                self._run.router.stop(generation)
                generation.end_at(self._num_read)
                break
        if generation.finish_reason is not None:
            if not self._stops.found:
                rest = self._stops.push(self._text.flush())
                events += self._answer.push(rest + self._stops.flush())
            events += self._answer.finish()
        return events, self._logprobs(start)

    def _visible(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token not in self._run.renderer.stop_texts]

    def _logprobs(self, start: int) -> list[dict[str, Any]] | None:
        if not self._request.logprobs:
            return None
        generation, end = self._generation, self._num_read
        ids, logprobs = generation.token_ids[start:end].tolist(), generation.logprobs[start:end].tolist()
        return token_logprobs(ids, logprobs, self._run.renderer.decode)

    def _abandon(self) -> None:
        self._run.router.cancel(self._generation, "the client went away")
        self._run.counters["abandoned_turns"] += 1
        message = assistant_message(self._answer.content, self._answer.calls, self.turn_id)
        self.turn = self._session.abandon(self._generation, self._prompt, message)

    def _open_prompt(self) -> Prompt:
        request = self._request
        try:
            return self._session.open_prompt(request.messages, request.tools, self._run.renderer)
        except jinja2.TemplateError as error:
            raise ApiError(
                400, f"The chat template refuses these messages: {error}", param="messages"
            ) from None

    def _budget(self) -> int:
        asked = self._request.max_tokens
        if self._session.claim is None:
            return asked or self._run.spec.context_length
        return min(asked or self._run.spec.max_tokens, self._run.spec.max_tokens)

    def _sampling(self, sample: int) -> Sampling:
        """The run's in its own sessions, whatever the agent asks for; else the request's (design 5.5)."""
        spec, request, claim = self._run.spec, self._request, self._session.claim
        if claim is None:
            seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
            return Sampling(request.temperature, request.top_p, 0, seed)
        seed = turn_seed(spec.seed, claim.place, self._prompt.index, sample)
        return Sampling(spec.temperature, spec.top_p, spec.top_k, seed)
