"""What external agents do: they open sessions, or declare groups."""

from __future__ import annotations

import asyncio
from typing import Any

from sf_core.dataplane.api_schemas import GroupBody, RewardBody, SessionBody
from sf_core.dataplane.runs import endings
from sf_core.dataplane.runs.claiming import declare_group, open_session
from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane.conversations import user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.verbs.served import Served


class Visitors(Served):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finished: dict[str, tuple[int, int]] = {}
        """Sampled tokens of each session that these agents finished, and the newest version among them."""

    async def _finish_external(self, session: Session, reward: float) -> None:
        self.finished[session.session_id] = session.num_sampled, self.version
        await self.report(session, status="finished", reward=reward)

    # --- sessions of no group

    @property
    def opened(self) -> list[Session]:
        return [session for session in self.run.sessions.values() if session.claim is None]

    async def open(self) -> Session:
        body = SessionBody(run_id="run", group=f"g{len(self.opened) % 2}", task_id="t")
        return await open_session(self.run, body, by_operator=False)

    async def finish_opened(self) -> None:
        """End a session of three turns, two of which extend the first."""
        for session in self.opened[:1]:
            first = self.sample(session, say(self.renderer, "one"))
            for text in ("two", "else"):
                self.sample(session, say(self.renderer, text), user("hi"), first.message, user(text))
            await self._finish_external(session, 1.0)

    async def finish_while_the_journal_is_compacted(self) -> None:
        await asyncio.gather(self.finish_opened(), self.run.compact())

    async def reward_opened(self) -> None:
        """Give a session a reward that stays open."""
        for session in self.opened[-1:]:
            turn = self.sample(session)
            steps = {session.turn_id(turn.prompt, turn.sample): 0.25}
            given = RewardBody(reward=0.5, reward_parts={"style": 0.5}, step_rewards=steps)
            await endings.reward(self.run, session, given)

    async def fail_opened(self) -> None:
        for session in self.opened[:1]:
            self.sample(session)
            await self.report(session, status="failed")

    # --- groups

    @property
    def outside(self) -> list[Session]:
        """Sessions of groups that external agents declared."""
        return [s for s in self.run.sessions.values() if s.claim is not None and s.claim.is_external]

    async def declared(self, size: int, **facts: Any) -> list[Session]:
        return await declare_group(self.run, GroupBody(size=size, **facts), by_operator=False)

    async def declare(self) -> None:
        await self.declared(1 + next(self.numbers) % 3, task_id="t")

    async def finish_outside(self) -> None:
        for session in self.outside[next(self.numbers) % 3 :][:1]:
            self.sample(session)
            await self._finish_external(session, float(next(self.numbers) % 2))

    async def fail_outside(self) -> None:
        for session in self.outside[-1:]:
            await self.report(session, status="failed")

    async def answer_outside(self) -> None:
        for session in self.outside[:1]:
            await self.report(session, status="answered")
