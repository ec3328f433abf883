"""The hub's part of a run whose turns are served by gateway processes.

Owns what a run does differently when its sessions are in other processes: it has them opened, dropped and
exported there. All else is as in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from sf_core.dataplane.bodies import ClaimBody, FinishBody, GroupBody, RunSpec, SessionBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.journal.events import encode, reader
from sf_core.dataplane.journal.journal import Compaction, Journal
from sf_core.dataplane.runs.events import Opened, RunEvent
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.view import earned

if TYPE_CHECKING:
    from sf_core.dataplane.sharding.hub import Gateway, GatewayLink, Gateways

_read_result = reader(FinishedSession)


class ShardedRun(ServedRun):
    def __init__(
        self,
        gateways: Gateways,
        spec: RunSpec,
        renderer: Renderer,
        journal: Journal,
        grace_s: float,
        memory: Memory,
    ) -> None:
        super().__init__(spec, renderer, journal, grace_s, memory)
        self.num_gateways = len(gateways.processes)
        self._gateways = gateways

    def port_of(self, session: Session) -> int:
        return self._owner(session).port

    async def announce(self) -> None:
        processes = self._gateways.processes
        await asyncio.gather(*(process.ask(lambda link: link.ask_to_open(self)) for process in processes))

    def state_for(self, index: int) -> list[Any]:
        """State of the run that a gateway is told when the gateway or the run starts."""
        held = {**self.sessions, **self.closing}
        sessions = [session for name, session in held.items() if self._gateways.of(name).index == index]
        told, opened = encode(self.spec), encode(Opened.of(sessions))
        return [self.spec.run_id, told, opened, str(self.journal.path), self.released]

    def note_versions(self, versions: dict[str, int]) -> None:
        """Note the oldest policy version of each session, as a gateway has read them from its journal."""
        for session_id, version in versions.items():
            session = self.sessions.get(session_id)
            if session is not None and session.claim is not None:
                self.note_started(session.claim, version)

    async def claim(self, body: ClaimBody) -> tuple[list[Session], bool]:
        sessions, released = await super().claim(body)
        await self._tell_opened([session for session in sessions if session.answer is None])
        return sessions, released

    async def open_for(self, body: SessionBody) -> Session:
        session = await super().open_for(body)
        await self._tell_opened([session])
        return session

    async def declare(self, body: GroupBody) -> list[Session]:
        sessions = await super().declare(body)
        await self._tell_opened(sessions)
        return sessions

    def open(self, session: Session) -> None:
        super().open(session)
        # its turns are in its gateway, which counts them
        self.memory.remove(session)

    def drop(self, session: Session, reason: str) -> None:
        super().drop(session, reason)
        self._owner(session).tell("drop", self.spec.run_id, session.session_id, reason)

    async def finish(self, session: Session, body: FinishBody) -> None:
        try:
            await super().finish(session, body)
        finally:
            # not earlier: until its end is in the journal, its gateway must keep it
            if session.session_id not in self.sessions and session.session_id not in self.closing:
                self._owner(session).tell("forget", self.spec.run_id, session.session_id)

    async def tree(self, session: Session) -> dict[str, Any]:
        tree = await self._ask_owner(session, "tree")
        return {**orjson.loads(tree), **earned(session)}

    def release(self) -> None:
        super().release()
        self._tell_everyone("released")

    async def leave(self) -> None:
        self._tell_everyone("left")
        await super().leave()

    async def compact(self, choose: Callable[[], Compaction[RunEvent]]) -> None:
        await super().compact(choose)
        self._tell_everyone("compact")

    async def take_out(self, session: Session, report: FinishBody) -> FinishedSession:
        """Have a session exported by its gateway. Raises ApiError if it is not; it is open again then."""
        began_at = session.began_at
        self.forget(session.session_id)
        facts = report.model_dump(mode="json", include=set(FinishBody.model_fields))
        try:
            return _read_result(await self._ask_owner(session, "close", facts))
        except BaseException:
            if session.is_external or self.counts(session):
                self.open(session)
                session.began_at = began_at
            raise

    async def _tell_opened(self, sessions: list[Session]) -> None:
        """Return when the gateways of these sessions serve them."""
        owned: dict[Gateway, list[Session]] = {}
        for session in sessions:
            owned.setdefault(self._owner(session), []).append(session)
        await asyncio.gather(*(owner.ask(partial(self._open_there, part)) for owner, part in owned.items()))

    def _open_there(self, sessions: list[Session], link: GatewayLink) -> asyncio.Future[Any]:
        """Have these sessions opened, without those that have ended meanwhile."""
        still = [session for session in sessions if self.sessions.get(session.session_id) is session]
        return link.ask("opened", self.spec.run_id, encode(Opened.of(still)))

    def _owner(self, session: Session) -> Gateway:
        return self._gateways.of(session.session_id)

    async def _ask_owner(self, session: Session, kind: str, *facts: Any) -> Any:
        value = [self.spec.run_id, session.session_id, *facts]
        return await self._owner(session).ask(lambda link: link.ask(kind, *value))

    def _tell_everyone(self, kind: str) -> None:
        for process in self._gateways.processes:
            process.tell(kind, self.spec.run_id)
