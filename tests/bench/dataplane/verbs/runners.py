"""What runners of agents do with the sessions that they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sf_core.dataplane.api_schemas import ClaimBody, TaskName
from sf_core.dataplane.runs import claiming
from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane.verbs.served import Served


class Runners(Served):
    async def claim(self) -> None:
        """Take up to three sessions."""
        await self.claimed("a", 3, *self.run.sessions)

    async def lose(self) -> None:
        """A session is not known to its runner any more."""
        await self.claimed("a", 0, *list(self.run.sessions)[1:])

    async def finish(self) -> None:
        """End a session with a reward."""
        for session in self.given_out[:1]:
            await self.end(session, float(next(self.numbers) % 5 < 2))

    async def fail(self) -> None:
        for session in self.given_out[-1:]:
            await self.report(session, status="failed")

    async def name_task(self) -> None:
        """An agent has begun on its task."""
        tasks = {session.session_id: TaskName(task_id="t", environment="e") for session in self.of("a")[:1]}
        await claiming.claim(self.run, ClaimBody(runner=self.runner, max=0, tasks=tasks))

    async def overflow(self) -> None:
        """A request did not fit into the context window."""
        for session in self.given_out[-1:]:
            await self.run.turns.note_overflow(session)

    async def play(self) -> None:
        await self.claim()
        for _ in list(self.run.sessions):
            await self.finish()

    async def give_out_while_an_end_is_recorded(self) -> None:
        given = self.given_out
        rewards = [float(next(self.numbers) % 3 == 0) for _ in given]
        await asyncio.gather(*map(self.end, given, rewards), self.claim(), self.claim())

    # --- whole groups

    async def end_group(self, rewards: Sequence[float | None]) -> None:
        """Give a group out and end its first sessions with these rewards; one without a reward fails."""
        await self.claim()
        for session, reward in zip(self.given_out[: len(rewards)], rewards, strict=True):
            await self.end(session, reward, error="KeyError: x" if reward is None else "")

    # --- answers, which others score

    async def take(self) -> None:
        """Take up to two sessions, in which the policy answers, and answers if this runner scores them."""
        at_work = [session.session_id for session in self.of("a")]
        for session in await self.claimed("a", 2, *at_work):
            if session.answer is None:
                self.sample(session)
            assert session.answer is None or not self.spec.get("scored_apart")

    async def answer(self) -> None:
        """An agent of this runner is done."""
        for session in [s for s in self.of("a") if s.answer is None][:1]:
            await self.report(session, status="answered", answer=f'"{session.session_id}"')

    async def answered(self, number: int = 1) -> list[Session]:
        """So many sessions have answered."""
        for _ in range(number):
            await self.take()
            await self.answer()
        return [session for session in self.run.sessions.values() if session.answer is not None][:number]

    async def lose_all(self) -> None:
        """The runner has begun anew."""
        await self.claimed("a", 0)
