"""One turn while it lives: its prompt, its generation, what reads the answer, who waits for it, its record.

Owns that nothing is forwarded before it is in the journal, how long a turn outlives its last client, and what
remains of it: `RecordedTurn` is its state on disk. Which request joins which turn is in opening.py. Knows no
HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError, EngineFailed
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.media.media import Media
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.routing.pace import StreamPace
from sf_core.dataplane.routing.router import Router
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.tree import Prompt
from sf_core.dataplane.sessions.turn_events import (
    Begun,
    Delivered,
    NewPrompt,
    Overflowed,
    RecordedTurn,
    Sampled,
    SampledTokens,
    TurnEnded,
    TurnKey,
)
from sf_core.dataplane.signals import Signal
from sf_core.dataplane.turns.answer import Answer, Pieces
from sf_core.dataplane.turns.answer_reader import AnswerReader
from sf_core.dataplane.turns.identity import RequestIdentity
from sf_core.dataplane.turns.request import TurnRequest
from sf_core.dataplane.turns.sampling import choose_sampling, limit_tokens
from sf_core.types import FinishReason, GenerationRequest, PictureSpan

log = logging.getLogger(__name__)

_request_numbers = itertools.count()


@dataclass(eq=False)
class LiveTurns:
    """The live turns of a run, and what serves them."""

    spec: RunSpec
    """What the run is registered with now."""
    renderer: Renderer
    media: Media
    router: Router
    journal: Journal
    grace_s: float
    """Seconds for which a turn goes on without a client."""
    memory: Memory
    counters: Counter[str]
    """The counters of the run."""
    sessions: dict[str, Session]
    """The run's open sessions, by id."""
    note_started: Callable[[Claim, int], None]
    """Told of every claimed session a policy version that may have sampled in it."""
    note_failed: Callable[[Session, EngineFailed], None] = lambda session, error: None
    """Told of requests that engines cannot serve."""
    pace: StreamPace = field(default_factory=StreamPace)
    in_flight: dict[str, list[LiveTurn]] = field(default_factory=dict)
    """Turns that are sampled, or whose answer a client is still being sent, by session id."""

    def includes(self, session: Session) -> bool:
        """Whether requests can name the session."""
        return self.sessions.get(session.session_id) is session

    async def note_overflow(self, session: Session) -> None:
        """A request of this session did not fit into the context window. Raises ApiError 503 while the
        journal cannot be written."""
        if self.includes(session) and not session.has_overflowed:
            session.has_overflowed = True
            await self.journal.attend(self.journal.append_chunk(Overflowed(session.session_id)))

    def set_aside_unanswered(self, session: Session) -> None:
        """At the end of a session, have it not train on answers that nobody got."""
        in_flight = [turn.recorded for turn in self.in_flight.get(session.session_id, ())]
        self.counters["abandoned_turns"] += session.set_aside_unanswered(in_flight)


class LiveTurn:
    """One sample of a request, until it is over and no client is left, or is refused for now: then it is a
    recorded turn like those that a restart finds, from which a retry goes on."""

    def __init__(
        self,
        turns: LiveTurns,
        session: Session,
        request: TurnRequest,
        prompt: Prompt,
        line: array[int],
        renderer: Renderer,
        grammar: str,
        nth: int,
        identity: RequestIdentity,
        recorded: RecordedTurn | None,
    ) -> None:
        """The `nth` sample of its request, or the recorded one continued. That has a prompt of its own: the
        client's key may say that another prompt is the same request. `line`: all ids of `prompt`, which the
        samples of a request share. `renderer` has the template options of the request."""
        is_new = recorded is None
        if recorded is None:
            key = TurnKey(session.session_id, prompt.index, session.begin_sample(prompt, nth))
            recorded = RecordedTurn(key, identity.digest, prompt)
        self.recorded = recorded
        self.prompt = recorded.prompt
        self.turn_id = session.turn_id(self.prompt, recorded.key.sample)
        self._turns = turns
        self._session = session
        self.reader = AnswerReader(renderer, request, self.prompt.forced, self.turn_id)
        if self.prompt is not prompt:
            line = self.prompt.full_ids()
        self._generation = self._make_generation(request, line, grammar, nth)
        recorded.restore(self._generation)
        recorded.chunks = []  # the generation has taken these tokens over
        self._num_recorded = len(self._generation.token_ids)
        self._is_recording = False
        self._is_put_off = False
        """Whether it was refused for now; a retry of its request continues it."""
        self.pieces: list[Pieces] = []
        """All parts of the answer so far."""
        self.is_over = False
        self.error: Exception | None = None
        self.changed = Signal()
        self._num_subscribers = 0
        self._grace: asyncio.TimerHandle | None = None
        # a session that no request can name cannot be retried: nothing to record, no client to wait for
        is_known = turns.includes(session)
        self._journal = turns.journal if is_known else None
        self._grace_s = turns.grace_s if is_known else 0.0
        if self._journal is not None and is_new:
            prompts = [NewPrompt.of(prompt) for prompt in session.take_unrecorded()]
            self._journal.note(Begun(recorded.key, nth, identity.digest, prompts))
        self._serving = asyncio.ensure_future(self._serve())

    def _make_generation(self, request: TurnRequest, line: array[int], grammar: str, nth: int) -> Generation:
        turns = self._turns
        session = self._session
        prompt = self.prompt
        spec = turns.spec
        claim = session.claim
        sample = self.recorded.key.sample
        prompt_ids = line
        pictures = list[PictureSpan]()
        if (sight := turns.renderer.sight) is not None:
            named = np.frombuffer(prompt_ids, dtype=np.int32)
            ids, pictures = session.pictures.read(named, sight)
            prompt_ids = array("i", ids.tobytes())
        asked = GenerationRequest(
            f"{next(_request_numbers)}",
            prompt_ids,
            position=0,
            max_tokens=limit_tokens(request, spec, claim, len(prompt_ids)),
            stop_token_ids=turns.renderer.stop_token_ids,
            sampling=choose_sampling(request, spec, claim, prompt.index, sample, nth),
            stream=request.stream or self.reader.reads_singly,
            grammar=grammar,
            pictures=tuple(pictures),
        )
        generation = Generation(asked, floor=max(prompt.version, session.floor))
        generation.session_id = session.session_id
        generation.pace = turns.pace
        if (before := prompt.continues) is not None:
            generation.comes_after(before.engine.split(",")[-1], prompt.version, prompt.start)
        if claim is not None:
            generation.on_start = lambda version: turns.note_started(claim, version)
        return generation

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._generation.request.prompt_ids)

    def answer(self) -> Answer:
        """The whole answer, once there are no more pieces."""
        generation = self._generation
        reader = self.reader
        turn = self.recorded.turn
        assert generation.finish_reason is not None and turn is not None
        called = bool(reader.answer.calls) and generation.finish_reason is FinishReason.STOP
        return Answer(
            self.turn_id,
            turn.message,
            "tool_calls" if called else generation.finish_reason.value,
            reader.stops.found,
            self.num_prompt_tokens,
            len(generation.token_ids),
            reader.logprobs,
        )

    # --- clients

    def is_answer_to(self, identity: RequestIdentity) -> bool:
        is_cancelled = self._generation.cancelled is not None
        if self.error is not None or is_cancelled or identity.digest != self.recorded.identity:
            return False
        if identity.insists:
            return True
        return not self.recorded.delivered if self.is_over else not self._num_subscribers

    def join(self) -> None:
        self._num_subscribers += 1
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def leave(self) -> None:
        self._num_subscribers -= 1
        if self.is_over:
            self._settle()
        elif not self._num_subscribers and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._cancel)
        self.changed.notify()

    def check(self) -> None:
        """Raises ApiError 503 while the turn waits for a journal that cannot be written. The turn goes on
        afterwards; a retry joins it."""
        if self._journal is not None and self._is_recording:
            self._journal.check()

    def set_delivered(self) -> None:
        if self.is_over and self.error is None and not self.recorded.delivered:
            self.recorded.delivered = True
            self.recorded.unanswered = False
            if self._journal is not None:
                self._journal.note(Delivered(self.recorded.key))

    def _cancel(self) -> None:
        """Stop sampling. What was sampled so far is not trained on."""
        self._turns.router.cancel(self._generation, "the client went away")

    # --- sampling and recording

    async def _serve(self) -> None:
        try:
            last = await self._sample()
            if self.recorded.turn is None:
                await self._record_end()
            self._publish(last)
        except Exception as error:  # raised by the subscribers
            self.error = error
            if self._generation.finish_reason is None:
                self._break_off()
            if isinstance(error, EngineFailed):
                self._turns.note_failed(self._session, error)
            if not isinstance(error, ApiError):
                log.exception("turn %s failed", self.turn_id)
        finally:
            self.is_over = True
            self.recorded.unanswered = not self.recorded.delivered
            if self._grace is not None:
                self._grace.cancel()
            self.changed.notify()
            self._settle()

    async def _sample(self) -> Pieces:
        """Record and publish the parts of the answer as they become final; returns the last ones."""
        generation = self._generation
        reader = self.reader
        self._session.running.add(generation)
        if generation.finish_reason is None:
            self._turns.router.submit(generation)
        try:
            while True:
                await generation.progress(reader.num_read)
                if generation.cancelled is not None:
                    raise ApiError(
                        410, f"This request was stopped: {generation.cancelled}.", code="session_over"
                    )
                pieces = reader.read(generation)
                if reader.is_at_end:
                    self._turns.router.stop(generation)
                if generation.finish_reason is not None:
                    return pieces
                if self._journal is not None and (chunk := self._take_chunk(reader.num_read)) is not None:
                    await self._until_recorded(self._journal.append_chunk(chunk))
                self._publish(pieces)
        finally:
            self._session.running.discard(generation)

    def _publish(self, pieces: Pieces) -> None:
        self.pieces.append(pieces)
        self.changed.notify()

    def _take_chunk(self, end: int) -> Sampled | None:
        """The tokens before this one that are in no event yet."""
        start = self._num_recorded
        self._num_recorded = end
        if start == end:
            return None
        engines = ",".join(self._generation.engines)
        return Sampled(self.recorded.key, SampledTokens.of(self._generation, start, end), engines)

    async def _record_end(self) -> None:
        """Put the turn into the session and its end on disk."""
        counters = self._turns.counters
        num_unparsed = self.reader.answer.num_unparsed
        message = self.reader.make_message()
        sample = self.recorded.key.sample
        turn = self._session.commit(self._generation, self.prompt, sample, message, num_unparsed)
        # no client has the answer yet: if the session ends before that, it is not trained on
        self.recorded.turn = turn
        self.recorded.unanswered = True
        counters["unparsed_calls"] += num_unparsed
        if turn.constrained:
            counters["constrained_turns"] += 1
        if self._journal is not None:
            end = TurnEnded.of(self.recorded.key, turn, self._num_recorded)
            await self._until_recorded(self._journal.append(end))

    def _break_off(self) -> None:
        """Keep what was sampled: for a retry if it was refused for now, else among what is abandoned."""
        turns = self._turns
        session = self._session
        recorded = self.recorded
        generation = self._generation
        reader = self.reader
        refusal = generation.refusal
        event: Sampled | TurnEnded | None
        # a retry cannot name a session that is not among the run's
        if refusal is not None and refusal.retry_after_s is not None and turns.includes(session):
            self._is_put_off = True
            # what was not read may go on behind a stop string
            num_kept = reader.num_read if reader.reads_singly else len(generation.token_ids)
            num_kept = max(num_kept, self._num_recorded)
            recorded.chunks = [SampledTokens.of(generation, 0, num_kept)]
            recorded.engines = ",".join(generation.engines)
            event = self._take_chunk(num_kept)
        else:
            self._cancel()
            turns.counters["abandoned_turns"] += 1
            sample = recorded.key.sample
            message = reader.make_message()
            recorded.turn = session.abandon(generation, self.prompt, sample, message)
            event = TurnEnded.of(recorded.key, recorded.turn, self._num_recorded)
        if self._journal is not None and event is not None:
            self._journal.note(event)

    async def _until_recorded(self, appending: Awaitable[None]) -> None:
        journal = self._turns.journal
        journal.watchers.add(self.changed)
        self._is_recording = True
        if journal.failure is not None:
            self.changed.notify()
        try:
            await appending
        finally:
            self._is_recording = False
            journal.watchers.discard(self.changed)

    def _settle(self) -> None:
        """Make it a recorded turn, if it was put off or is over without a client left."""
        turns = self._turns
        session = self._session
        in_flight = turns.in_flight.get(session.session_id, [])
        if (self._is_put_off or not self._num_subscribers) and self in in_flight:
            in_flight.remove(self)
            if not in_flight:
                del turns.in_flight[session.session_id]
            if self._is_put_off or self.error is None:
                session.recorded.append(self.recorded)
        turns.memory.weigh(session)
