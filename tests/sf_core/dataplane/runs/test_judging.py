"""Answers of a group that are scored together: by one runner, all of them or none."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.agents.reports import Reports
from sf_core.dataplane.api_schemas import ClaimBody, TaskName
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs import claiming
from sf_core.recipes.group_rewards import majority
from tests.bench import dataplane
from tests.bench.properties import examples
from tests.bench.waits import wait_until

OPERATIONS = [
    *("take", "take", "answer", "answer", "answer", "fail", "judge_group", "judge_group", "judge_part"),
    *("drop_group", "lose_all", "fail_answer", "seal", "seal", "publish", "restart", "begin_attempt"),
    *("go_on_while_it_is_compacted_twice", "leave_group", "leave_part"),
]

ANSWERED = ["take", "take", "answer", "answer", "answer"]

RULES: dict[str, Any] = {"judges_groups": True, "group_size": 3, "gate": "all", "session_attempts": 2}


async def answered(driver: dataplane.run_driver.Driver, number: int, **rules: Any) -> None:
    """So many sessions of the first group have answered."""
    await driver.register(**RULES | rules)
    await driver.do("take", "take", *["answer"] * number)


async def test_answers_wait_for_the_last_of_their_group_without_ageing_and_go_to_one_runner(
    driver: dataplane.run_driver.Driver,
) -> None:
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
    await driver.judge_group()
    assert driver.ledger.groups[0].is_complete


async def test_a_judge_may_drop_the_group(driver: dataplane.run_driver.Driver) -> None:
    await answered(driver, 3)
    given = await driver.claimed("c", 1)
    await driver.report_all(given, status="failed", cause="group")
    assert driver.ledger.rejected == {0: "not_judged"}
    assert driver.run.counters["rejected_groups.not_judged"] == 1
    assert driver.run.counters["failed_sessions"] == 0
    assert not any(session.session_id in driver.run.sessions for session in given)


@pytest.mark.parametrize("num_scored", [0, 1, 2])
async def test_without_its_judge_a_group_is_judged_again_from_all_answers_or_rejected(
    driver: dataplane.run_driver.Driver, num_scored: int
) -> None:
    await answered(driver, 3)
    given = await driver.claimed("c", 1)
    await driver.report_all(given[:num_scored], status="finished", reward=1.0)
    await driver.claimed("c", 0)
    assert driver.ledger.rejected == ({0: "half_judged"} if num_scored else {})
    answers = [s.session_id for s in await driver.claimed("d", 1) if s.answer is not None]
    assert answers == ([] if num_scored else [session.session_id for session in given])


async def test_a_judge_that_was_lost_and_reports_late_leaves_no_group_that_is_half_judged(
    driver: dataplane.run_driver.Driver,
) -> None:
    await answered(driver, 3)
    given = await driver.claimed("c", 1)
    await driver.claimed("c", 0)
    await driver.report_all(given[:1], status="finished", reward=1.0)
    assert not [s for s in await driver.claimed("d", 1) if s.answer is not None]
    assert driver.ledger.rejected == {0: "half_judged"}
    assert driver.run.counters["rejected_groups.half_judged"] == 1


async def test_an_answer_that_ends_before_its_judge_has_it_leaves_the_others_waiting_for_another(
    driver: dataplane.run_driver.Driver,
) -> None:
    await answered(driver, 3)
    first, *others = [s for s in driver.run.sessions.values() if s.answer is not None]
    await driver.report(first, status="failed")
    (again,) = await driver.claimed("a", 1, *[s.session_id for s in driver.of("a")])
    assert again.session_id == "run.g0.0.a1"
    assert [session.began_at for session in others] == [math.inf] * 2
    driver.sample(again)
    await driver.report(again, status="answered", answer='"late"')
    assert await driver.claimed("c", 1) == [again, *others]


@pytest.mark.parametrize("judges_groups", [False, True])
async def test_answers_that_would_be_scored_in_another_way_are_given_again_by_a_later_attempt(
    driver: dataplane.run_driver.Driver, judges_groups: bool
) -> None:
    await answered(driver, 2, judges_groups=not judges_groups)
    await driver.register(judges_groups=judges_groups, attempt=2)
    given = await driver.claimed("a", 3)
    assert [session.session_id for session in given] == [f"run.g0.{i}.a1" for i in range(3)]
    assert [session.answer for session in given] == [None] * 3


async def test_an_answer_waits_without_ageing_although_its_task_is_told_later(
    driver: dataplane.run_driver.Driver,
) -> None:
    await answered(driver, 2)
    tasks = {"run.g0.0.a0": TaskName(task_id="t", environment="e")}
    await claiming.claim(driver.run, ClaimBody(runner="b1", max=0, tasks=tasks))
    session = driver.run.sessions["run.g0.0.a0"]
    assert (session.task_id, session.began_at) == ("t", math.inf)


async def test_an_answer_that_came_before_the_end_of_its_agent_was_told_ages_all_the_same(
    driver: dataplane.run_driver.Driver,
) -> None:
    await answered(driver, 3)
    await claiming.claim(driver.run, ClaimBody(runner="b1", max=0, answered=["run.g0.0.a0"]))
    assert driver.run.sessions["run.g0.0.a0"].began_at == driver.run.state.serving_s


async def test_a_reward_that_is_refused_leaves_no_group_that_is_half_judged(
    driver: dataplane.run_driver.Driver,
) -> None:
    await answered(driver, 3, success={"part": "answer"})
    given = await driver.claimed("c", 1)
    parts = [{"answer": 1.0}, {"other": 1.0}, {"answer": 0.0}]
    ending = [
        driver.report(session, status="finished", reward=1.0, reward_parts=part)
        for session, part in zip(given, parts, strict=True)
    ]
    await asyncio.gather(*ending, return_exceptions=True)
    assert driver.ledger.rejected == {0: "half_judged"}


async def test_a_group_is_judged_without_a_session_that_failed_for_good(
    driver: dataplane.run_driver.Driver,
) -> None:
    await answered(driver, 2, session_attempts=1, least_sessions=2)
    await driver.report(driver.run.sessions["run.g0.2.a0"], status="failed")
    given = await driver.claimed("c", 1)
    assert [session.session_id for session in given] == ["run.g0.0.a0", "run.g0.1.a0"]


@settings(max_examples=examples(50))
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=60))
@example(operations=[*ANSWERED, "take"])
@example(operations=[*ANSWERED, "take", "judge_part"])
@example(operations=[*ANSWERED, "take", "judge_part", "judge_group"])
@example(operations=[*ANSWERED, "take", "judge_part", "leave_group", "take", "judge_group"])
@example(operations=[*ANSWERED, "take", "leave_part", "restart", "take", "judge_group"])
async def test_no_group_is_judged_from_a_part_of_its_answers_whatever_happens(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async with dataplane.run_driver.driving(model_dir, renderer) as driver:
        await driver.register(**RULES)
        for operation in operations:
            await driver.do(operation)
            for group in driver.ledger.groups.values():
                if group.is_complete:
                    names = [f"run.g{group.index}.{i}.a{m.attempt}" for i, m in enumerate(group.members)]
                    assert [driver.given_with[name] for name in names] == [3, 3, 3]


def test_an_answer_that_comes_back_to_be_judged_before_its_report_is_answered_stays_with_its_runner(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
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
    served_plane.connect(lambda prompt, seed: dataplane.planes.say(renderer, "x"))

    async def group_reward(task: Any, answers: list[Any]) -> list[float]:
        await asyncio.sleep(0.1)
        return [1.0] * len(answers)

    dataplane.served_runs.run_runner(served_plane, "a0", "agent", group_reward=group_reward)
    wait_until(lambda: bool(served_plane.get("/runs/run/batches/0")["ready"]))
    counters = served_plane.get("/runs/run")["counters"]
    assert not [name for name in counters if name.startswith("rejected_groups.")]
    assert counters.get("retries", 0) == 0


def test_runners_make_a_batch_whose_groups_are_judged_by_majority(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    said = iter(["four", "Four ", "five"] * 1000)
    served_plane.register(group_size=3, groups_per_batch=2, judges_groups=True)
    served_plane.connect(lambda prompt, seed: dataplane.planes.say(renderer, "x"))
    seen: list[int] = []

    def group_reward(task: Any, answers: list[Any]) -> list[float] | None:
        seen.append(len(answers))
        return majority(task, answers)

    async def agent(task: Any, endpoint: Any) -> str:
        await dataplane.served_runs.ask_for_an_answer(task, endpoint)
        return next(said)

    dataplane.served_runs.run_runner(served_plane, "a0", "agent", agent=agent, group_reward=group_reward)
    wait_until(lambda: bool(served_plane.get("/runs/run/batches/0")["ready"]))
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert sealed["sessions"] == 6 and set(seen) == {3}
    assert 0.0 < sealed["reward_mean"] < 1.0
