"""A gateway process's part of a run: the sessions that the process owns.

Owns their turns, the journal of these, and their export. Which are open is the hub's decision (hub_run.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing

from sf_core.dataplane.bodies import FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.events import encode
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import TurnEvent, read_turn_event
from sf_core.dataplane.sharding.peer import Peer
from sf_core.dataplane.sharding.relay import UplinkRouter
from sf_core.dataplane.turns.host import TurnHost


class RunShard(TurnHost):
    def __init__(
        self,
        spec: RunSpec,
        renderer: Renderer,
        journal: Journal,
        router: UplinkRouter,
        grace_s: float,
        memory: Memory,
        hub: Peer,
    ) -> None:
        super().__init__(spec, renderer, journal, router, grace_s, memory)
        self._hub = hub
        self.oldest: dict[str, int] = {}
        """Oldest policy version by session id, of the turns that the journal had."""
        self._closed: dict[str, bytes | None] = {}
        """Results of sessions that the hub's journal does not have yet, by id; None while being exported."""

    def count(self, name: str, number: int = 1) -> None:
        if number:
            self._hub.tell("counted", self.spec.run_id, name, number)

    def note_started(self, claim: Claim, version: int) -> None:
        name = claim.session_id(self.spec.run_id)
        self.oldest[name] = min(version, self.oldest.get(name, version))

    async def restore(self, sessions: Iterable[Session]) -> None:
        """Open these sessions, with the turns that a process before this one recorded. Raises ApiError 503
        while the journal cannot be written."""
        self.open_new(sessions)
        async with aclosing(self.journal.replay(read_turn_event)) as events:
            async for event in events:
                self.recover_turn(event)

    def open_new(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            if session.session_id not in self.sessions and session.session_id not in self._closed:
                self.open(session)

    def keep_only(self, session_ids: Iterable[str]) -> None:
        """Drop all other sessions, which are over."""
        for session_id in self.sessions.keys() - set(session_ids):
            self.drop(self.sessions[session_id], "the session is over")

    def find(self, session_id: str) -> Session:
        """The open session of this id. Raises ApiError 404."""
        if (session := self.sessions.get(session_id)) is None:
            raise ApiError.no_session(session_id)
        return session

    def close(self, session_id: str, report: FinishBody) -> bytes:
        """End a session; returns the same result until `forget_closed`. Raises ApiError 404."""
        result = self._closed.get(session_id)
        if result is None:
            session = self.find(session_id)
            self._closed[session_id] = None
            self.drop(session, report.parting)
            result = self._closed[session_id] = encode(self.export(session, report))
        return result

    def forget_closed(self, session_id: str) -> None:
        """Forget the result of a session, which the hub has."""
        self._closed.pop(session_id, None)

    async def leave(self) -> None:
        """Stop serving the run."""
        for session_id in list(self.sessions):
            self.forget(session_id)
        await self.journal.close()

    async def compact(self) -> None:
        """Drop the events of sessions that are over and exported."""
        await self.journal.compact(read_turn_event, lambda: ([], self._is_held))

    def _is_held(self, event: TurnEvent) -> bool:
        # in this order: a session is in both for a moment when it is closed
        return event.session_id in self.sessions or event.session_id in self._closed
