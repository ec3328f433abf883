"""What runners do that score answers: each by itself, or those of a group together."""

from __future__ import annotations

from typing import Any

from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane.verbs.runners import Runners


class Judges(Runners):
    questions = 0
    """Questions that judges were asked in reports that count."""

    async def finish(self) -> None:
        """End what this run scores in one go: a session, an answer, or the answers of a group."""
        if self.spec.get("judges_groups"):
            await self.judge_group()
        elif self.spec.get("scored_apart"):
            await self.judge()
        else:
            await super().finish()

    # --- each answer by itself: runners `s` and `t`

    async def to_score(self, name: str, limit: int = 9, *running: str) -> list[Session]:
        """What a runner that scores is given."""
        return await self.claimed(name, limit, *running, work="reward")

    async def report_judged(self, session: Session, **report: Any) -> None:
        """Report on an answer about which a judge was asked."""
        self.questions += 1
        asked = {"judge": "taste", "item": f"q{self.questions}", "tokens": 10, "attempts": 1, "reply": "x"}
        await self.report(session, **{"judgements": [asked], "scoring": session.scoring, **report})

    async def leave(self, session: Session, times: int = 1) -> None:
        """An answer could not be judged, so often."""
        for _ in range(times):
            await self.to_score("s")
            await self.report_judged(session, status="unjudged", answer='"x"', error="away")

    async def score(self) -> None:
        for name in ("s", "t"):
            await self.to_score(name, 1, *[session.session_id for session in self.of(name)])

    async def judge(self) -> None:
        for name in ("s", "t"):
            for session in self.of(name)[:1]:
                await self.report_judged(session, status="finished", reward=1.0)

    async def leave_one(self) -> None:
        """A runner could not have its answer judged."""
        for session in self.of("s")[:1]:
            await self.report_judged(session, status="unjudged", answer='"x"', error="away")

    async def score_locally(self) -> None:
        """A runner of agents has scored an answer itself, which could not be judged."""
        for session in [s for s in self.of("a") if s.answer is None][:1]:
            await self.report_judged(session, status="unjudged", answer='"x"', error="away")

    async def leave_stale(self) -> None:
        """The same is told again, or of an answer that another runner has by now."""
        for session in [s for s in self.run.sessions.values() if s.answer is not None][:1]:
            before = session.runner, session.num_unjudged, len(session.judgements)
            report = {"status": "unjudged", "answer": '"x"', "scoring": "of before", "judgements": [{}]}
            await self.report(session, **report)
            assert (session.runner, session.num_unjudged, len(session.judgements)) == before

    async def lose_scorer(self) -> None:
        await self.to_score("t", 0)

    # --- the answers of a group together

    def to_judge(self) -> list[Session]:
        """Answers of one group that a runner has."""
        given = [s for s in self.run.sessions.values() if s.answer is not None and s.runner]
        group = given[0].claim.slot.group if given and given[0].claim else None
        return [s for s in given if s.claim is not None and s.claim.slot.group == group]

    async def judge_group(self) -> None:
        await self.report_all(self.to_judge(), status="finished", reward=1.0)

    async def judge_part(self) -> None:
        await self.report_all(self.to_judge()[:1], status="finished", reward=1.0)

    async def drop_group(self) -> None:
        await self.report_all(self.to_judge()[:1], status="failed", cause="group")

    async def leave_group(self, limit: int | None = None) -> None:
        """The answers of a group could not be judged; all are told of, or some before something else."""
        told = [(session, session.scoring) for session in self.to_judge()]
        for session, scoring in told[:limit]:
            await self.report(session, status="unjudged", answer="0", scoring=scoring)

    async def leave_part(self) -> None:
        await self.leave_group(1)

    async def fail_answer(self) -> None:
        """The time of an answer is over."""
        answers = [session for session in self.run.sessions.values() if session.answer is not None]
        await self.report_all(answers[:1], status="failed", cause="reward")
