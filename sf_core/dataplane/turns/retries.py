"""Turns and the requests that wait for them: a retry joins its turn instead of sampling another.

Owns which request belongs to which turn, how long a turn outlives its last client, and that nothing is
forwarded before it is in the journal. What a turn samples is in turn.py.

Clients mark a retry by `Idempotency-Key` (any HTTP client may send one) or by `X-Stainless-Retry-Count` (the
OpenAI and Anthropic SDKs always do). An agent that repeats a request itself after its stream broke sends
neither; an equal body is a retry while the turn has no client or its answer was not delivered. Two clients
that wait for equal bodies at the same time are two samples of one prompt, not a retry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import Begun, Delivered, Ended, NewPrompt, RecordedTurn, Sampled
from sf_core.dataplane.signals import Signal
from sf_core.dataplane.turns.answer import Answer, Pieces
from sf_core.dataplane.turns.host import TurnHost
from sf_core.dataplane.turns.turn import TurnService
from sf_core.types import FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Identifies a request when it is retried."""

    identity: bytes
    """Digest of the client's key, else of the body; `of_turn` adds the index of the turn."""
    insists: bool
    """The request is marked as a retry or has a key: even a delivered answer is sent once more."""

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> RequestIdentity:
        """The ticket of a request. Header names are lower case, as in ASGI."""
        found = dict(headers)
        key = found.get(b"idempotency-key")
        retries = found.get(b"x-stainless-retry-count", b"0")
        identity = _digest(body, b"body") if key is None else _digest(key, b"key")
        return cls(identity, key is not None or retries not in (b"", b"0"))

    def of_turn(self, number: int) -> RequestIdentity:
        """The ticket of one of the turns that the request asks for."""
        return replace(self, identity=_digest(self.identity + number.to_bytes(4, "little"), b"turn"))


def _digest(data: bytes, kind: bytes) -> bytes:
    return blake2b(data, digest_size=16, person=kind).digest()


def is_known(run: TurnHost, session: Session, ticket: RequestIdentity) -> bool:
    """Whether the turn that this request waits for was begun already."""
    return _find_served(run, session, ticket) is not None or _find_recorded(session, ticket) is not None


def join_turn(
    run: TurnHost,
    session: Session,
    ticket: RequestIdentity,
    begin: Callable[[RecordedTurn | None], TurnService],
) -> Subscriber:
    """A listener on the turn this request waits for: one that is being served, or what `begin` makes, a
    recorded turn continued or a new turn. Raises what `begin` raises."""
    if (known := _find_served(run, session, ticket)) is not None:
        return Subscriber(known)
    if (recorded := _find_recorded(session, ticket)) is not None:
        session.recorded.remove(recorded)
    turn = begin(recorded)
    asked = turn.prompt, ticket.identity
    in_flight = run.in_flight.get(session.session_id, ())
    others = [other for other in in_flight if other.known.may_be_asked_again(*asked)]
    session.recorded = [known for known in session.recorded if known.may_be_asked_again(*asked)]
    served = InFlightTurn(run, session, turn, ticket, recorded)
    run.in_flight[session.session_id] = [*others, served]
    return Subscriber(served)


def _find_served(run: TurnHost, session: Session, ticket: RequestIdentity) -> InFlightTurn | None:
    in_flight = reversed(run.in_flight.get(session.session_id, ()))
    return next((served for served in in_flight if served.is_answer_to(ticket)), None)


def _find_recorded(session: Session, ticket: RequestIdentity) -> RecordedTurn | None:
    for recorded in reversed(session.recorded):
        # an agent that has the answer and repeats the body asks for another sample
        if recorded.identity == ticket.identity and (ticket.insists or not recorded.delivered):
            return recorded
    return None


class InFlightTurn:
    """A turn being served, with all its pieces so far. Without a client it goes on for `run.grace_s`. Once it
    is over and no client is left, or once it is refused for now, it becomes a recorded turn like those that a
    restart finds."""

    def __init__(
        self,
        run: TurnHost,
        session: Session,
        turn: TurnService,
        ticket: RequestIdentity,
        recorded: RecordedTurn | None,
    ) -> None:
        self.turn = turn
        self.known = recorded or RecordedTurn(turn.key, ticket.identity, turn.prompt)
        """The recorded turn that it becomes."""
        self.pieces: list[Pieces] = []
        self.is_over = False
        self.error: Exception | None = None
        self.changed = Signal()
        self._run, self._session = run, session
        self._num_recorded = len(recorded.tokens.ids) if recorded else 0
        self._is_recording = False
        self._is_recorded = self.known.turn is not None
        self.known.chunks = []  # the turn has taken these tokens over
        self._listeners: set[Subscriber] = set()
        self._grace: asyncio.TimerHandle | None = None
        # a session that no request can name cannot be retried: nothing to record, no client to wait for
        is_known = run.sessions.get(session.session_id) is session
        self._journal = run.journal if is_known else None
        self._grace_s = run.grace_s if is_known else 0.0
        if self._journal is not None and recorded is None:
            prompts = [NewPrompt.of(prompt) for prompt in session.take_unrecorded()]
            self._journal.note(Begun(turn.key, turn.nth, ticket.identity, prompts))
        self._serving = asyncio.ensure_future(self._serve())

    def is_answer_to(self, ticket: RequestIdentity) -> bool:
        if self.error is not None or self.turn.is_cancelled or ticket.identity != self.known.identity:
            return False
        if ticket.insists:
            return True
        return not self.known.delivered if self.is_over else not self._listeners

    def join(self, listener: Subscriber) -> None:
        self._listeners.add(listener)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def leave(self, listener: Subscriber) -> None:
        self._listeners.discard(listener)
        if self.is_over:
            self._settle()
        elif not self._listeners and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self.turn.cancel)

    def check(self) -> None:
        """Raises ApiError 503 while the turn waits for a journal that cannot be written. The turn goes on
        afterwards; a retry joins it."""
        if self._journal is not None and self._is_recording:
            self._journal.check()

    def set_delivered(self) -> None:
        if self.is_over and self.error is None and not self.known.delivered:
            self.known.delivered, self.known.unanswered = True, False
            if self._journal is not None:
                self._journal.note(Delivered(self.turn.key))

    async def _serve(self) -> None:
        last: Pieces | None = None
        try:
            async for pieces in self.turn.pieces():
                if self.turn.is_over:
                    last = pieces
                else:
                    await self._record_chunk()
                    self._publish(pieces)
            await self._record_turn()
            assert last is not None
            self._publish(last)
        except Exception as error:  # raised by the listeners
            self.error = error
            self._note_unfinished()
            if not isinstance(error, ApiError):
                log.exception("turn %s failed", self.turn.turn_id)
        finally:
            self.is_over = True
            self.known.turn, self.known.unanswered = self.turn.turn, not self.known.delivered
            if self._grace is not None:
                self._grace.cancel()
            self.changed.notify()
            self._settle()

    def _settle(self) -> None:
        """Make it a recorded turn, if it was put off or is over without a client left."""
        run, session, is_put_off = self._run, self._session, self.turn.is_put_off
        in_flight = run.in_flight.get(session.session_id, [])
        if (is_put_off or not self._listeners) and self in in_flight:
            in_flight.remove(self)
            if not in_flight:
                del run.in_flight[session.session_id]
            if is_put_off or self.error is None:
                session.recorded.append(self.known)
        run.memory.weigh(session)

    def _publish(self, pieces: Pieces) -> None:
        self.pieces.append(pieces)
        self.changed.notify()

    async def _record_chunk(self) -> None:
        if self._journal is not None and (chunk := self._next_chunk()) is not None:
            await self._until_recorded(self._journal, self._journal.append_chunk(chunk))

    def _next_chunk(self) -> Sampled | None:
        turn, start = self.turn, self._num_recorded
        if turn.num_read <= start:
            return None
        self._num_recorded = turn.num_read
        return Sampled(turn.key, turn.tokens_since(start), turn.engines)

    async def _record_turn(self) -> None:
        if self._journal is not None and not self._is_recorded:
            assert self.turn.turn is not None
            # no client has the answer yet: if the session ends before that, it is not trained on
            self.known.turn, self.known.unanswered = self.turn.turn, True
            end = Ended.of(self.turn.key, self.turn.turn, self._num_recorded)
            await self._until_recorded(self._journal, self._journal.append(end))

    async def _until_recorded(self, journal: Journal, appending: Awaitable[None]) -> None:
        journal.watchers.add(self.changed)
        self._is_recording = True
        if journal.failure is not None:
            self.changed.notify()
        try:
            await appending
        finally:
            self._is_recording = False
            journal.watchers.discard(self.changed)

    def _note_unfinished(self) -> None:
        turn = self.turn.turn
        event: Sampled | Ended | None = None
        if self.turn.is_put_off:
            self.known.chunks, self.known.engines = [self.turn.tokens_since(0)], self.turn.engines
            event = self._next_chunk()
        elif turn is not None and turn.finish_reason is FinishReason.ABORT:
            event = Ended.of(self.turn.key, turn, self._num_recorded)
        if self._journal is not None and event is not None:
            self._journal.note(event)


class Subscriber:
    """One request that waits for a turn and gets all its pieces."""

    def __init__(self, served: InFlightTurn) -> None:
        self._served = served
        self._is_gone = False
        served.join(self)

    @property
    def turn_id(self) -> str:
        return self._served.turn.turn_id

    @property
    def num_prompt_tokens(self) -> int:
        return self._served.turn.num_prompt_tokens

    async def pieces(self) -> AsyncIterator[Pieces]:
        """All pieces of the turn's answer. Raises what the turn raised."""
        served, num_seen = self._served, 0
        while True:
            while num_seen < len(served.pieces):
                num_seen += 1
                yield served.pieces[num_seen - 1]
            if self._is_gone:
                raise ApiError(400, "The client went away before its answer was complete.")
            if served.error is not None:
                raise served.error
            if served.is_over:
                return
            served.check()
            await served.changed.wait()

    def check(self) -> None:
        """Raises ApiError 503 while the turn cannot go on; see InFlightTurn.check."""
        self._served.check()

    def answer(self) -> Answer:
        """The whole answer, once there are no more pieces."""
        return self._served.turn.answer()

    def leave(self) -> None:
        """The client is gone or has its answer. An unfinished turn goes on for a while, for a retry."""
        if not self._is_gone:
            self._is_gone = True
            self._served.leave(self)
            self._served.changed.notify()

    def set_delivered(self) -> None:
        """All of the answer has been sent."""
        if not self._is_gone:
            self._served.set_delivered()
