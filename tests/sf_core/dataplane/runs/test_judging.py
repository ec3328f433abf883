"""Answers of a group that are scored together: by one runner, all of them or none."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.agents.reports import Reports
from sf_core.dataplane.bodies import ClaimBody, FinishBody, TaskName
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.sessions.session import Session
from sf_core.recipes.group_rewards import majority
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import ServedPlane, say
from tests.bench.dataplane.run_driver import Driver
from tests.patience import wait_until
from tests.properties import examples
from tests.sf_core.dataplane.runs.test_scoring import ask_for_an_answer, run_runner

OPERATIONS = ["take", "take", "answer", "answer", "answer", "fail", "judge", "judge", "judge_some", "drop"]
OPERATIONS += ["lose", "fail_answer", "seal", "seal", "publish", "restart", "begin_attempt", "compact"]
OPERATIONS += ["leave", "leave_some"]

ANSWERED = ["take", "take", "answer", "answer", "answer"]


class JudgingDriver(Driver):
    """A run whose groups of three are judged by runner `j`; agents belong to runner `a`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.judged: dict[str, int] = {}
        """Number of answers of its group that the last runner was given with the answer of each session."""

    async def register(self, **changes: Any) -> None:
        usual = {"judges_groups": True, "group_size": 3, "gate": "all", "session_attempts": 2}
        await super().register(**{**usual, **changes})

    async def claimed(self, name: str, limit: int, *running: str) -> list[Session]:
        body = ClaimBody(runner=f"{name}{self.spec['attempt']}", max=limit, running=list(running))
        sessions = (await claiming.claim(self.run, body))[0]
        groups = Counter(s.claim.place.group for s in sessions if s.claim and s.answer is not None)
        self.judged |= {s.session_id: groups[s.claim.place.group] for s in sessions if s.claim}
        return sessions

    async def claim(self) -> None:
        await self.claimed("a", 3, *self.run.sessions)

    def of(self, name: str) -> list[Session]:
        return [s for s in self.run.sessions.values() if s.runner == f"{name}{self.spec['attempt']}"]

    async def take(self) -> None:
        """An agent runner takes sessions, and answers if there are some, which it scores."""
        at_work = [session.session_id for session in self.of("a")]
        for session in await self.claimed("a", 2, *at_work):
            if session.answer is None:
                sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)

    async def answer(self) -> None:
        for session in [s for s in self.of("a") if s.answer is None][:1]:
            await endings.finish(
                self.run, session, FinishBody(status="answered", answer=f'"{session.session_id}"')
            )

    async def fail(self) -> None:
        for session in [s for s in self.of("a") if s.answer is None][-1:]:
            await endings.finish(self.run, session, FinishBody(status="failed"))

    def to_judge(self) -> list[Session]:
        """Answers of one group that a runner has."""
        given = [s for s in self.run.sessions.values() if s.answer is not None and s.runner]
        group = given[0].claim.place.group if given and given[0].claim else None
        return [s for s in given if s.claim is not None and s.claim.place.group == group]

    async def report(self, sessions: list[Session], **report: Any) -> None:
        ending = [
            endings.finish(self.run, session, FinishBody.model_validate(report)) for session in sessions
        ]
        await asyncio.gather(*ending)

    async def judge(self) -> None:
        await self.report(self.to_judge(), status="finished", reward=1.0)

    async def judge_some(self) -> None:
        await self.report(self.to_judge()[:1], status="finished", reward=1.0)

    async def drop(self) -> None:
        await self.report(self.to_judge()[:1], status="failed", cause="group")

    async def leave(self, limit: int | None = None) -> None:
        """The answers of a group could not be judged; all are told of, or some before something else."""
        told = [(session, session.scoring) for session in self.to_judge()]
        for session, scoring in told[:limit]:
            report = FinishBody(status="unjudged", answer="0", scoring=scoring)
            await endings.finish(self.run, session, report)

    async def leave_some(self) -> None:
        await self.leave(1)

    async def fail_answer(self) -> None:
        """The time of an answer is over."""
        answers = [session for session in self.run.sessions.values() if session.answer is not None]
        await self.report(answers[:1], status="failed", cause="reward")

    async def lose(self) -> None:
        await self.claimed("a", 0)

    async def compact(self) -> None:
        await self.go_on_while_it_is_compacted_twice()

    async def finish(self) -> None:
        await self.judge()


def with_driver(
    folder: Path, model_dir: str, renderer: Renderer, scenario: Callable[[JudgingDriver], Awaitable[None]]
) -> None:
    async def run() -> None:
        driver = JudgingDriver(folder, model_dir, renderer)
        await driver.register()
        await scenario(driver)
        await driver.plane.close()

    asyncio.run(run())


async def answered(driver: JudgingDriver, number: int) -> None:
    """So many sessions of the first group have answered."""
    for _ in range(2):
        await driver.take()
    for _ in range(number):
        await driver.answer()


def test_answers_wait_for_the_last_of_their_group_without_ageing_and_go_to_one_runner(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await answered(driver, 2)
        waiting = [s for s in driver.run.sessions.values() if s.answer is not None]
        assert [session.began_at for session in waiting] == [math.inf] * 2
        others = await driver.claimed("b", 1)
        assert [session.answer for session in others] == [None], "nothing is to be scored yet"
        await driver.answer()
        assert {session.began_at for session in waiting} == {driver.run.state.serving_s}
        given = await driver.claimed("c", 1)
        assert [session.session_id for session in given] == [f"run.g0.{i}.a0" for i in range(3)]
        assert await driver.claimed("d", 3) != given
        await driver.judge()
        assert driver.run.state.ledger.groups[0].is_complete

    with_driver(tmp_path, model_dir, renderer, scenario)


def test_a_judge_may_drop_the_group(tmp_path: Path, model_dir: str, renderer: Renderer) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await answered(driver, 3)
        given = await driver.claimed("c", 1)
        await driver.report(given, status="failed", cause="group")
        assert driver.run.state.ledger.rejected == {0: "not_judged"}
        assert driver.run.counters["rejected_groups.not_judged"] == 1
        assert driver.run.counters["failed_sessions"] == 0
        assert not any(session.session_id in driver.run.sessions for session in given)

    with_driver(tmp_path, model_dir, renderer, scenario)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("num_scored", [0, 1, 2])
def test_without_its_judge_a_group_is_judged_again_from_all_answers_or_rejected(
    tmp_path: Path, model_dir: str, renderer: Renderer, num_scored: int, restarts: bool
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await answered(driver, 3)
        given = await driver.claimed("c", 1)
        await driver.report(given[:num_scored], status="finished", reward=1.0)
        if restarts:
            await driver.restart()
        else:
            await driver.claimed("c", 0)
        assert driver.run.state.ledger.rejected == ({0: "half_judged"} if num_scored else {})
        answers = [s.session_id for s in await driver.claimed("d", 1) if s.answer is not None]
        assert answers == ([] if num_scored else [session.session_id for session in given])

    with_driver(tmp_path, model_dir, renderer, scenario)


def test_a_judge_that_was_lost_and_reports_late_leaves_no_group_that_is_half_judged(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await answered(driver, 3)
        given = await driver.claimed("c", 1)
        await driver.claimed("c", 0)
        await driver.report(given[:1], status="finished", reward=1.0)
        assert not [s for s in await driver.claimed("d", 1) if s.answer is not None]
        assert driver.run.state.ledger.rejected == {0: "half_judged"}
        assert driver.run.counters["rejected_groups.half_judged"] == 1

    with_driver(tmp_path, model_dir, renderer, scenario)


def test_an_answer_that_ends_before_its_judge_has_it_leaves_the_others_waiting_for_another(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await answered(driver, 3)
        first, *others = [s for s in driver.run.sessions.values() if s.answer is not None]
        await driver.report([first], status="failed")
        (again,) = await driver.claimed("a", 1, *[s.session_id for s in driver.of("a")])
        assert again.session_id == "run.g0.0.a1"
        assert [session.began_at for session in others] == [math.inf] * 2
        sample(again, driver.renderer, [user("hi")], say(driver.renderer, "x"), version=0)
        await endings.finish(driver.run, again, FinishBody(status="answered", answer='"late"'))
        assert await driver.claimed("c", 1) == [again, *others]

    with_driver(tmp_path, model_dir, renderer, scenario)


@pytest.mark.parametrize("judges_groups", [False, True])
def test_answers_that_would_be_scored_in_another_way_are_given_again_by_a_later_attempt(
    tmp_path: Path, model_dir: str, renderer: Renderer, judges_groups: bool
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await driver.register(judges_groups=not judges_groups)
        await answered(driver, 2)
        await driver.register(judges_groups=judges_groups, attempt=2)
        given = await driver.claimed("a", 3)
        assert [session.session_id for session in given] == [f"run.g0.{i}.a1" for i in range(3)]
        assert [session.answer for session in given] == [None] * 3
        await driver.check_restart()

    with_driver(tmp_path, model_dir, renderer, scenario)


def test_an_answer_waits_without_ageing_although_its_task_is_told_later(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await answered(driver, 2)
        tasks = {"run.g0.0.a0": TaskName(task_id="t", environment="e")}
        await claiming.claim(driver.run, ClaimBody(runner="b1", max=0, tasks=tasks))
        session = driver.run.sessions["run.g0.0.a0"]
        assert (session.task_id, session.began_at) == ("t", math.inf)

    with_driver(tmp_path, model_dir, renderer, scenario)


def test_an_answer_that_came_before_the_end_of_its_agent_was_told_ages_all_the_same(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await answered(driver, 3)
        await claiming.claim(driver.run, ClaimBody(runner="b1", max=0, answered=["run.g0.0.a0"]))
        assert driver.run.sessions["run.g0.0.a0"].began_at == driver.run.state.serving_s

    with_driver(tmp_path, model_dir, renderer, scenario)


def test_a_reward_that_is_refused_leaves_no_group_that_is_half_judged(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await driver.register(success={"part": "answer"}, attempt=2)
        await answered(driver, 3)
        given = await driver.claimed("c", 1)
        parts = [{"answer": 1.0}, {"other": 1.0}, {"answer": 0.0}]
        reports = [FinishBody(status="finished", reward=1.0, reward_parts=part) for part in parts]
        ending = [endings.finish(driver.run, *each) for each in zip(given, reports, strict=True)]
        await asyncio.gather(*ending, return_exceptions=True)
        assert driver.run.state.ledger.rejected == {0: "half_judged"}

    with_driver(tmp_path, model_dir, renderer, scenario)


def test_a_group_is_judged_without_a_session_that_failed_for_good(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        await driver.register(session_attempts=1, least_sessions=2, attempt=2)
        await driver.take()
        await driver.take()
        await driver.answer()
        await driver.answer()
        last = driver.run.sessions["run.g0.2.a0"]
        await endings.finish(driver.run, last, FinishBody(status="failed"))
        given = await driver.claimed("c", 1)
        assert [session.session_id for session in given] == ["run.g0.0.a0", "run.g0.1.a0"]

    with_driver(tmp_path, model_dir, renderer, scenario)


@settings(max_examples=examples(50), deadline=None)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=60))
@example(operations=[*ANSWERED, "take", "judge_some", "judge"])
@example(operations=[*ANSWERED, "take", "judge_some", "leave", "take", "judge"])
@example(operations=[*ANSWERED, "take", "leave_some", "restart", "take", "judge"])
def test_no_group_is_judged_from_a_part_of_its_answers_whatever_happens(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async def scenario(driver: JudgingDriver) -> None:
        for operation in operations:
            await getattr(driver, operation)()
            for group in driver.run.state.ledger.groups.values():
                if group.is_complete:
                    names = [f"run.g{group.index}.{i}.a{m.attempt}" for i, m in enumerate(group.members)]
                    assert [driver.judged[name] for name in names] == [3, 3, 3]
        before = driver.state()
        halves = {group.index for group in driver.run.state.ledger.groups.values() if group.is_half_judged}
        await driver.restart()
        if not halves:
            assert driver.state() == before
        assert not any(group.is_half_judged for group in driver.run.state.ledger.groups.values())

    with tempfile.TemporaryDirectory() as folder:
        with_driver(Path(folder), model_dir, renderer, scenario)


def test_an_answer_that_comes_back_to_be_judged_before_its_report_is_answered_stays_with_its_runner(
    served_plane: ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Reports._post

    async def post_slowly(self: Any, http: Any, reports: list[Any]) -> Any:
        response = await post(self, http, reports)
        if any(b'"answered"' in report for _, report in reports):
            await asyncio.sleep(0.2)
        return response

    monkeypatch.setattr(Reports, "_post", post_slowly)
    # every claim names the runner's sessions
    monkeypatch.setattr("sf_core.agents.runner.BEAT_S", 0.0)
    served_plane.register(group_size=3, groups_per_batch=4, judges_groups=True)
    served_plane.connect(lambda prompt, seed: say(renderer, "x"))

    async def group_reward(task: Any, answers: list[Any]) -> list[float]:
        await asyncio.sleep(0.1)
        return [1.0] * len(answers)

    run_runner(served_plane, "a0", "agent", group_reward=group_reward)
    wait_until(lambda: bool(served_plane.get("/runs/run/batches/0")["ready"]))
    counters = served_plane.get("/runs/run")["counters"]
    assert not [name for name in counters if name.startswith("rejected_groups.")]
    assert counters.get("retries", 0) == 0


def test_runners_make_a_batch_whose_groups_are_judged_by_majority(
    served_plane: ServedPlane, renderer: Renderer
) -> None:
    said = iter(["four", "Four ", "five"] * 1000)
    served_plane.register(group_size=3, groups_per_batch=2, judges_groups=True)
    served_plane.connect(lambda prompt, seed: say(renderer, "x"))
    seen: list[int] = []

    def group_reward(task: Any, answers: list[Any]) -> list[float] | None:
        seen.append(len(answers))
        return majority(task, answers)

    async def agent(task: Any, endpoint: Any) -> str:
        await ask_for_an_answer(task, endpoint)
        return next(said)

    run_runner(served_plane, "a0", "agent", agent=agent, group_reward=group_reward)
    wait_until(lambda: bool(served_plane.get("/runs/run/batches/0")["ready"]))
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert sealed["sessions"] == 6 and set(seen) == {3}
    assert 0.0 < sealed["reward_mean"] < 1.0
