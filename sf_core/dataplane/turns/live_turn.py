"""A turn in progress: its prompt, generation, answer reader, subscribers and record.

Owns that nothing is forwarded before it is in the journal, how long a turn outlives its last client, and its
record: a `RecordedTurn` is the state of the turn on disk. opening.py decides which request joins which turn.
Knows no HTTP.
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

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.conditions import Condition
from sf_core.dataplane.errors import ApiError, EngineFailed
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.media import Media
from sf_core.dataplane.routing.generation import Generation, StreamPace
from sf_core.dataplane.routing.router import Router
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
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
from sf_core.dataplane.turns.answer import Answer, AnswerReader, Pieces
from sf_core.dataplane.turns.request import RequestFingerprint, TurnRequest
from sf_core.dataplane.turns.sampling import choose_sampling, limit_tokens
from sf_core.types import FinishReason, GenerationRequest, ImageSpan

log = logging.getLogger(__name__)

_request_numbers = itertools.count()


@dataclass(eq=False)
class LiveTurns:
    """The live turns of a run, and the parts of the run that serve them."""

    spec: RunSpec
    """The latest registration of the run."""
    renderer: Renderer
    media: Media
    router: Router
    journal: Journal
    grace_s: float
    """Seconds for which a turn goes on without a client."""
    memory: MemoryBudget
    counters: Counter[str]
    """The counters of the run."""
    sessions: dict[str, Session]
    """The run's open sessions, by id."""
    note_started: Callable[[Claim, int], None]
    """Called, for every claimed session, with a policy version that may have sampled in it."""
    note_failed: Callable[[Session, EngineFailed], None] = lambda session, error: None
    """Called for requests that engines cannot serve."""
    pace: StreamPace = field(default_factory=StreamPace)
    in_flight: dict[str, list[LiveTurn]] = field(default_factory=dict)
    """Turns that are being sampled, or whose answer is being sent to a client, by session id."""

    def includes(self, session: Session) -> bool:
        """Whether requests can name the session: it is among the run's open sessions."""
        return self.sessions.get(session.session_id) is session

    async def note_overflow(self, session: Session) -> None:
        """A request of this session did not fit into the context window. Raises ApiError 503 while the
        journal cannot be written."""
        if self.includes(session) and not session.has_overflowed:
            session.has_overflowed = True
            await self.journal.await_unless_failing(self.journal.append_chunk(Overflowed(session.session_id)))

    def abandon_undelivered(self, session: Session) -> None:
        """At the end of a session, exclude answers from training that no client received."""
        in_flight = [turn.recorded for turn in self.in_flight.get(session.session_id, ())]
        self.counters["abandoned_turns"] += session.abandon_undelivered(in_flight)


class LiveTurn:
    """One sample of a request, until the turn is over and no client is left, or until the turn is refused for
    now. Then a recorded turn remains, like those that a restart finds. A retry continues it."""

    def __init__(
        self,
        turns: LiveTurns,
        session: Session,
        request: TurnRequest,
        prompt: Prompt,
        prompt_ids: array[int],
        renderer: Renderer,
        grammar: str,
        nth: int,
        fingerprint: RequestFingerprint,
        recorded: RecordedTurn | None,
    ) -> None:
        """The `nth` sample of its request, or the continuation of `recorded`. A recorded turn has a prompt of
        its own: the client's key may say that another prompt is the same request. `prompt_ids` are all ids of
        `prompt`, which the samples of a request share. `renderer` has the template options of the request."""
        is_new = recorded is None
        if recorded is None:
            key = TurnKey(session.session_id, prompt.index, session.begin_sample(prompt, nth))
            recorded = RecordedTurn(key, fingerprint.digest, prompt)
        self.recorded = recorded
        self.prompt = recorded.prompt
        self.turn_id = session.turn_id(self.prompt, recorded.key.sample)
        self._turns = turns
        self._session = session
        self.reader = AnswerReader(renderer, request, self.prompt.forced, self.turn_id)
        if self.prompt is not prompt:
            prompt_ids = self.prompt.full_ids()
        self._generation = self._make_generation(request, prompt_ids, grammar, nth)
        recorded.restore(self._generation)
        recorded.chunks = []  # the generation holds these tokens now
        self._num_recorded = len(self._generation.token_ids)
        """Number of sampled tokens that are in the journal, or on the way to it."""
        self._is_recording = False
        """Whether the turn waits for a write to the journal."""
        self._is_postponed = False
        """Whether the turn was refused for now; a retry of the request continues it."""
        self.pieces: list[Pieces] = []
        """All parts of the answer so far."""
        self.is_over = False
        self.error: Exception | None = None
        self.changed = Condition()
        self._num_subscribers = 0
        self._grace: asyncio.TimerHandle | None = None
        # no request can name an ad-hoc session again: there is no retry to record for or to wait for
        can_be_retried = turns.includes(session)
        self._journal = turns.journal if can_be_retried else None
        self._grace_s = turns.grace_s if can_be_retried else 0.0
        if self._journal is not None and is_new:
            prompts = [NewPrompt.from_prompt(prompt) for prompt in session.pop_unrecorded_prompts()]
            self._journal.append_later(Begun(recorded.key, nth, fingerprint.digest, prompts))
        self._serving = asyncio.ensure_future(self._serve())

    def _make_generation(
        self, request: TurnRequest, prompt_ids: array[int], grammar: str, nth: int
    ) -> Generation:
        turns = self._turns
        session = self._session
        prompt = self.prompt
        spec = turns.spec
        claim = session.claim
        sample = self.recorded.key.sample
        images = list[ImageSpan]()
        if (image_processor := turns.renderer.image_processor) is not None:
            named = np.frombuffer(prompt_ids, dtype=np.int32)
            ids, images = session.images.read(named, image_processor)
            prompt_ids = array("i", ids.tobytes())
        whole_request = GenerationRequest(
            f"{next(_request_numbers)}",
            prompt_ids,
            position=0,
            max_tokens=limit_tokens(request, spec, claim, len(prompt_ids)),
            stop_token_ids=turns.renderer.stop_token_ids,
            sampling=choose_sampling(request, spec, claim, prompt.index, sample, nth),
            stream=request.stream or self.reader.reads_singly,
            grammar=grammar,
            images=tuple(images),
        )
        generation = Generation(whole_request, floor=max(prompt.version, session.floor))
        generation.session_id = session.session_id
        generation.pace = turns.pace
        if (parent := prompt.continues) is not None:
            last_engine = parent.engine.split(",")[-1]
            generation.set_parent(last_engine, prompt.version, prompt.start)
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
        ends_with_calls = bool(reader.answer.calls) and generation.finish_reason is FinishReason.STOP
        return Answer(
            self.turn_id,
            turn.message,
            "tool_calls" if ends_with_calls else generation.finish_reason.value,
            reader.stops.found,
            self.num_prompt_tokens,
            len(generation.token_ids),
            reader.logprobs,
        )

    # --- clients

    def answers(self, fingerprint: RequestFingerprint) -> bool:
        """Whether a request with this fingerprint is a retry that gets the answer of this turn."""
        has_failed = self.error is not None or self._generation.cancelled is not None
        if has_failed or fingerprint.digest != self.recorded.fingerprint:
            return False
        if fingerprint.is_marked:
            return True
        # an equal body without a mark is a retry only while its answer has not reached a client
        return not self.recorded.delivered if self.is_over else not self._num_subscribers

    def subscribe(self) -> None:
        self._num_subscribers += 1
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def unsubscribe(self) -> None:
        self._num_subscribers -= 1
        if self.is_over:
            self._release()
        elif not self._num_subscribers and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._cancel)
        self.changed.notify()

    def check(self) -> None:
        """Raises ApiError 503 while the turn waits for a journal that cannot be written. The turn continues
        afterwards, and a retry joins it."""
        if self._journal is not None and self._is_recording:
            self._journal.check()

    def record_delivery(self) -> None:
        if self.is_over and self.error is None and not self.recorded.delivered:
            self.recorded.delivered = True
            self.recorded.undelivered = False
            if self._journal is not None:
                self._journal.append_later(Delivered(self.recorded.key))

    def _cancel(self) -> None:
        """Stop sampling. The tokens sampled so far are not trained on."""
        self._turns.router.cancel(self._generation, "the client went away")

    # --- sampling and recording

    async def _serve(self) -> None:
        try:
            last_pieces = await self._sample()
            if self.recorded.turn is None:
                await self._record_end()
            self._publish(last_pieces)
        except Exception as error:  # raised by the subscribers
            self.error = error
            if self._generation.finish_reason is None:
                self._record_unfinished()
            if isinstance(error, EngineFailed):
                self._turns.note_failed(self._session, error)
            if not isinstance(error, ApiError):
                log.exception("turn %s failed", self.turn_id)
        finally:
            self.is_over = True
            self.recorded.undelivered = not self.recorded.delivered
            if self._grace is not None:
                self._grace.cancel()
            self.changed.notify()
            self._release()

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
                if self._journal is not None and (event := self._next_event(reader.num_read)) is not None:
                    await self._wait_until_recorded(self._journal.append_chunk(event))
                self._publish(pieces)
        finally:
            self._session.running.discard(generation)

    def _publish(self, pieces: Pieces) -> None:
        self.pieces.append(pieces)
        self.changed.notify()

    def _next_event(self, end: int) -> Sampled | None:
        """The event with the tokens before `end` that are in no event so far; None without such tokens."""
        start = self._num_recorded
        self._num_recorded = end
        if start == end:
            return None
        engines = ",".join(self._generation.engines)
        return Sampled(
            self.recorded.key, SampledTokens.from_generation(self._generation, start, end), engines
        )

    async def _record_end(self) -> None:
        """Put the turn into the session and its end on disk."""
        counters = self._turns.counters
        num_unparsed = self.reader.answer.num_unparsed
        message = self.reader.make_message()
        sample = self.recorded.key.sample
        turn = self._session.commit(self._generation, self.prompt, sample, message, num_unparsed)
        # no client has the answer so far: if the session ends now, the answer is not trained on
        self.recorded.turn = turn
        self.recorded.undelivered = True
        counters["unparsed_calls"] += num_unparsed
        if turn.constrained:
            counters["constrained_turns"] += 1
        if self._journal is not None:
            end = TurnEnded.from_turn(self.recorded.key, turn, self._num_recorded)
            await self._wait_until_recorded(self._journal.append(end))

    def _record_unfinished(self) -> None:
        """Record the sampled tokens of a turn that failed: for a retry if it was refused for now, else as an
        abandoned turn."""
        turns = self._turns
        session = self._session
        recorded = self.recorded
        generation = self._generation
        reader = self.reader
        refusal = generation.refusal
        event: Sampled | TurnEnded | None
        is_refused_for_now = refusal is not None and refusal.retry_after_s is not None
        if is_refused_for_now and turns.includes(session):
            self._is_postponed = True
            # unread tokens may lie after a stop string
            num_retained = reader.num_read if reader.reads_singly else len(generation.token_ids)
            num_retained = max(num_retained, self._num_recorded)
            recorded.chunks = [SampledTokens.from_generation(generation, 0, num_retained)]
            recorded.engines = ",".join(generation.engines)
            event = self._next_event(num_retained)
        else:
            self._cancel()
            turns.counters["abandoned_turns"] += 1
            sample = recorded.key.sample
            message = reader.make_message()
            recorded.turn = session.abandon(generation, self.prompt, sample, message)
            event = TurnEnded.from_turn(recorded.key, recorded.turn, self._num_recorded)
        if self._journal is not None and event is not None:
            self._journal.append_later(event)

    async def _wait_until_recorded(self, appending: Awaitable[None]) -> None:
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

    def _release(self) -> None:
        """Leave only the recorded turn, if the turn was postponed, or is over without a client left."""
        turns = self._turns
        session = self._session
        in_flight = turns.in_flight.get(session.session_id, [])
        if (self._is_postponed or not self._num_subscribers) and self in in_flight:
            in_flight.remove(self)
            if not in_flight:
                del turns.in_flight[session.session_id]
            if self._is_postponed or self.error is None:
                session.recorded.append(self.recorded)
        turns.memory.update(session)
