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

from sf_core.dataplane.bodies import ClaimBody, FinishBody, RunSpec, SessionBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.journal.journal import Compaction, Journal
from sf_core.dataplane.runs.records import opened_record, run_record
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.finished import FinishedSession, read_finished
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session

if TYPE_CHECKING:
    from sf_core.dataplane.sharding.hub import Gateways


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
        self.num_gateways = gateways.num_gateways
        self._gateways = gateways

    async def announce(self) -> None:
        self._gateways.runs[self.spec.run_id] = self
        await self._gateways.open(self)

    def state_for(self, gateway: int) -> list[Any]:
        """State of the run that a gateway is told when the gateway or the run starts."""
        held = {**self.sessions, **self.closing}
        sessions = [s for name, s in held.items() if self._gateways.owner(name) == gateway]
        opened = opened_record(sessions)["opened"]
        return [run_record(self.spec)["run"], opened, str(self.journal.path), self.released]

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

    def open(self, session: Session) -> None:
        super().open(session)
        # its turns are in its gateway, which counts them
        self.memory.remove(session)

    def drop(self, session: Session, reason: str) -> None:
        super().drop(session, reason)
        self._tell_owner(session, "drop", reason)

    async def finish(self, session: Session, body: FinishBody) -> None:
        try:
            await super().finish(session, body)
        finally:
            # not earlier: until its end is in the journal, its gateway must keep it
            if session.session_id not in self.sessions and session.session_id not in self.closing:
                self._tell_owner(session, "forget")

    async def tree(self, session: Session) -> dict[str, Any]:
        tree = await self._ask_owner(session, "tree")
        return {**orjson.loads(tree), "reward": session.reward, "reward_parts": session.reward_parts}

    def release(self) -> None:
        super().release()
        for i in range(self.num_gateways):
            self._gateways.tell(i, "released", self.spec.run_id)

    async def leave(self) -> None:
        del self._gateways.runs[self.spec.run_id]
        for i in range(self.num_gateways):
            self._gateways.tell(i, "left", self.spec.run_id)
        await super().leave()

    async def compact(self, choose: Callable[[], Compaction]) -> None:
        await super().compact(choose)
        for i in range(self.num_gateways):
            self._gateways.tell(i, "compact", self.spec.run_id)

    async def take_out(self, session: Session, report: FinishBody) -> FinishedSession:
        """Have a session exported by its gateway. Raises ApiError if it is not; it is open again then."""
        expires_at = session.expires_at
        self.forget(session.session_id)
        facts = report.model_dump(mode="json", include=set(FinishBody.model_fields))
        try:
            return read_finished(await self._ask_owner(session, "close", facts))
        except BaseException:
            if session.claim is None or self.manager.group_of(session.claim) is not None:
                self.open(session)
                session.expires_at = expires_at
            raise

    async def _tell_opened(self, sessions: list[Session]) -> None:
        """Return when the gateways of these sessions serve them."""
        owned: dict[int, list[Session]] = {}
        for session in sessions:
            owned.setdefault(self._gateways.owner(session.session_id), []).append(session)
        await asyncio.gather(
            *(self._gateways.ask(o, "opened", partial(self._opened, part)) for o, part in owned.items())
        )

    def _opened(self, sessions: list[Session]) -> list[Any]:
        """Message that opens these sessions, without those that have ended meanwhile."""
        still = [session for session in sessions if self.sessions.get(session.session_id) is session]
        return [self.spec.run_id, opened_record(still)["opened"]]

    async def _ask_owner(self, session: Session, kind: str, *facts: Any) -> Any:
        owner = self._gateways.owner(session.session_id)
        value = [self.spec.run_id, session.session_id, *facts]
        return await self._gateways.ask(owner, kind, lambda: value)

    def _tell_owner(self, session: Session, kind: str, *facts: Any) -> None:
        owner = self._gateways.owner(session.session_id)
        self._gateways.tell(owner, kind, [self.spec.run_id, session.session_id, *facts])
