"""Answers that no judge could score: scored again, counted, and what becomes of them in the end."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.api_schemas import FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.status import batch_status
from sf_core.dataplane.errors import WrongField
from sf_core.dataplane.runs import endings
from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane.run_driver import Driver, driving
from tests.bench.properties import examples

OPERATIONS = [
    *("take", "take", "answer", "answer", "leave_one", "leave_stale", "judge", "judge", "fail"),
    *("lose_scorer", "seal", "publish", "restart", "begin_attempt", "go_on_while_it_is_compacted_twice"),
    *("score", "score", "score_locally"),
]

RULES: dict[str, Any] = {"gate": "all", "session_attempts": 3, "scored_apart": True}

ALONE: dict[str, Any] = {"group_size": 1, "groups_per_batch": 1}


async def answered(driver: Driver, number: int = 1, **rules: Any) -> list[Session]:
    """So many sessions have answered; runners that score apart judge them."""
    await driver.register(**RULES | rules)
    return await driver.answered(number)


async def test_an_answer_that_was_not_judged_is_given_to_the_next_runner(driver: Driver) -> None:
    [session] = await answered(driver)
    await driver.leave(session)
    assert (session.runner, session.num_unjudged) == ("", 1)
    [again] = await driver.to_score("t")
    assert (again.session_id, again.answer, again.num_unjudged) == (session.session_id, session.answer, 1)
    assert await driver.to_score("u") == []
    assert driver.run.state.recent.last_error == "away"
    assert driver.run.counters["unjudged"] == 1
    assert driver.run.counters["failed_sessions"] == 0


async def test_what_is_told_twice_counts_once_and_takes_the_answer_from_nobody(driver: Driver) -> None:
    [session] = await answered(driver)
    await driver.to_score("s")
    told = {"status": "unjudged", "scoring": session.scoring, "judgements": [{"judge": "j"}]}
    await driver.report(session, **told)
    await driver.report(session, **told)
    assert (session.num_unjudged, len(session.judgements)) == (1, 1)
    assert await driver.to_score("s") == [session]
    await driver.report(session, **told)
    assert (session.num_unjudged, session.runner) == (1, "s1")


async def test_a_runner_of_agents_leaves_its_answer_to_others_once(driver: Driver) -> None:
    await driver.register(**RULES | ALONE)
    await driver.take()
    session = driver.of("a")[0]
    told = {"status": "unjudged", "answer": '"mine"', "output": "log", "judgements": [{"judge": "j"}]}
    await driver.report(session, **told)
    await driver.report(session, **told)
    assert (session.answer, session.num_unjudged) == ('"mine"', 1)
    assert await driver.to_score("s") == [session]
    await driver.report_judged(session, status="finished", reward=1.0)
    [row] = driver.trajectories(await driver.seal_batch(0))
    assert row.output == "log"


async def test_a_group_goes_when_an_answer_of_it_could_never_be_judged(driver: Driver) -> None:
    [session, *_] = await answered(driver, 2)
    await driver.leave(session, 2)
    assert driver.ledger.rejected == {}
    await driver.leave(session)
    assert driver.ledger.rejected == {0: "not_judged"}
    assert not driver.run.state.sessions_of("train", 0)


async def test_judges_that_never_answer_end_the_run(driver: Driver) -> None:
    await driver.register(**RULES | ALONE | {"session_attempts": 1})
    for _ in range(10):
        assert driver.run.fault == ""
        [session] = await driver.answered()
        await driver.leave(session)
    assert driver.run.fault == (
        "the last 10 groups were all dropped (not_judged 10), so no batch can be completed: check "
        "that the "
        "judges answer; the last error was away"
    )


async def test_an_answer_that_its_runner_scores_is_not_ended_before_the_runner_has_told_of_it(
    driver: Driver,
) -> None:
    waiting, given = await answered(driver, 2, score_timeout_s=5.0)
    waiting.began_at = given.began_at = 0.0
    driver.run.state.serving_s = 4.0
    assert await driver.to_score("s", 1) == [waiting]
    driver.run.state.serving_s = 10.0
    await endings.end_expired(driver.run)
    assert waiting.session_id in driver.run.sessions, "it was given out at 4 s"
    assert given.session_id in driver.run.sessions, "no worker that serves the judges has it yet"
    driver.run.state.serving_s = 9.0 + endings.SCORING_GRACE_S + 0.1
    await endings.end_expired(driver.run)
    assert waiting.session_id not in driver.run.sessions


async def test_an_answer_that_was_not_judged_before_is_ended_by_its_runner_alone(driver: Driver) -> None:
    waiting, told = await answered(driver, 2)
    await driver.leave(told)
    await driver.register(scored_apart=False, score_timeout_s=5.0)
    driver.run.state.serving_s = 100.0
    await endings.end_expired(driver.run)
    assert waiting.session_id not in driver.run.sessions
    assert driver.run.sessions[told.session_id].num_unjudged == 1


async def test_without_a_runner_that_serves_its_judges_a_run_says_so(driver: Driver) -> None:
    await answered(driver)
    said = batch_status(driver.run, 0)["waiting_for"]
    assert "no runner that scores and serves the judges is connected" in said
    await driver.to_score("s")
    assert "no runner that scores" not in batch_status(driver.run, 0)["waiting_for"]


# --- held-out sessions


async def evaluated(driver: Driver, num_tasks: int) -> list[Session]:
    """The sessions of an evaluation, which have answered."""
    await driver.register(**RULES)
    await driver.evaluate(num_tasks)
    return await driver.answered(num_tasks)


async def test_a_held_out_session_that_was_not_judged_leaves_the_mean(driver: Driver) -> None:
    first, second, third = await evaluated(driver, 3)
    await driver.to_score("s")
    await driver.report_judged(first, status="finished", reward=1.0)
    await driver.report_judged(second, status="finished", reward=0.5)
    await driver.report_judged(third, status="unjudged", error="away")
    await driver.leave(third, 2)
    assert driver.ledger.evaluations[0].is_complete
    await driver.check_restart()
    sealed = await driver.seal_evaluation(0)
    assert sealed["reward_mean"] == 0.75
    assert (sealed["num_tasks"], sealed["unjudged"], sealed["sessions"]) == (3, 1, 3)
    assert (sealed["failed"], sealed["failures"], sealed["reward_min"]) == (0, {}, 0.5)
    [file] = sealed["files"]
    rows = pq.read_table(driver.directory.path(file["uri"])).to_pylist()
    told = {row["session_id"]: (row["reward"], row["status"]) for row in rows}
    assert told[third.session_id] == (None, "not_judged")
    assert told[first.session_id] == (1.0, "finished")
    judged = driver.judgements(sealed, "evaluate")
    assert [row["session_id"] for row in judged].count(third.session_id) == 3
    assert len(judged) == 5


async def test_an_evaluation_of_which_nothing_was_judged_ends_the_run_and_is_judged_when_it_goes_on(
    driver: Driver,
) -> None:
    first, second = await evaluated(driver, 2)
    await driver.leave(first, 3)
    assert driver.run.fault == ""
    await driver.leave(second, 3)
    assert driver.run.fault == (
        "no answer of the evaluation of version 0 could be judged; each of 2 answers was tried 3 times: "
        "away. Check that the judges answer, then resume the run"
    )
    assert await driver.to_score("s") == []
    await driver.register(attempt=2)
    given = await driver.to_score("s")
    assert {session.session_id for session in given} == {first.session_id, second.session_id}
    await driver.report_judged(given[0], status="finished", reward=1.0)
    await driver.report_judged(given[1], status="unjudged", error="away")
    sealed = await driver.seal_evaluation(0)
    assert (sealed["reward_mean"], sealed["unjudged"]) == (1.0, 1)


# --- answers that are scored together


async def judged_together(driver: Driver) -> list[Session]:
    """The answers of a group, which runner `s` has."""
    await answered(driver, 2, judges_groups=True, group_size=2, groups_per_batch=1)
    return await driver.to_score("s")


async def test_answers_of_a_group_that_were_not_judged_are_scored_together_again(driver: Driver) -> None:
    first, second = await judged_together(driver)
    told = {"status": "unjudged", "answer": '"x"'}
    scoring = second.scoring
    await driver.report_judged(first, **told)
    await driver.report_judged(second, scoring=scoring, judgements=[], **told)
    assert [first.num_unjudged, second.num_unjudged] == [1, 1], "it counts once"
    again = await driver.to_score("t")
    assert [session.session_id for session in again] == [first.session_id, second.session_id]
    assert not any(session.waits_for_group for session in again)
    assert await driver.to_score("u") == []
    await driver.report_judged(again[0], status="finished", reward=1.0)
    await driver.report_judged(again[1], status="finished", reward=0.0, judgements=[])
    sealed = await driver.seal_batch(0)
    assert [(row["session_id"], row["item"]) for row in driver.judgements(sealed)] == [
        (first.session_id, "q1"),
        (first.session_id, "q3"),
    ]


async def test_answers_that_were_scored_without_the_others_leave_no_group(driver: Driver) -> None:
    first, second = await judged_together(driver)
    # told late by a runner that was lost
    await driver.report_judged(first, status="finished", reward=1.0)
    await driver.report_judged(second, status="unjudged")
    assert await driver.to_score("t") == []
    assert driver.ledger.rejected == {0: "half_judged"}
    assert driver.run.state.spent == {"taste": 20}


async def test_a_group_whose_answers_could_never_be_judged_together_goes(driver: Driver) -> None:
    first, _ = await judged_together(driver)
    for _ in range(2):
        await driver.report_judged(first, status="unjudged")
        await driver.to_score("s")
    assert driver.ledger.rejected == {}
    await driver.report_judged(first, status="unjudged")
    assert driver.ledger.rejected == {0: "not_judged"}


# --- what is stored


async def test_judgements_are_a_table_of_the_batch_that_takes_their_sessions(driver: Driver) -> None:
    first, second = await answered(driver, 2, **ALONE)
    await driver.leave(first)
    await driver.to_score("s")
    noted = {"item": "length", "verdict": "3"}
    asked = {"judge": "taste", "tokens": 5, "seconds": 2.0, "attempts": 2, "reply": "?"}
    pair = [
        {"judge": "taste", "pair": 7, "cached": True, "reply": "A", "verdict": '{"A": 0.9, "B": 0.1}'},
        {"judge": "taste", "pair": 7, "cached": True, "reply": "B", "verdict": '{"A": 0.2, "B": 0.8}'},
    ]
    asked |= {"discarded": ["length", "empty", "length"]}
    await driver.report_judged(first, status="finished", reward=1.0, judgements=[noted, asked, *pair])
    await driver.report_judged(second, status="finished", reward=1.0, judgements=[{**noted, "verdict": "5"}])
    counted = {"discarded_replies.length": 2, "discarded_replies.empty": 1}
    assert counted.items() <= driver.run.counters.items()
    await driver.restart()
    assert counted.items() <= driver.run.counters.items()
    sealed = await driver.seal_batch(0)
    assert sealed["noted"] == {"length": 3.0}
    assert sealed["judges"]["taste"] == {
        "calls": 3,
        "tokens": 15,
        "p95_seconds": pytest.approx(1.9),
        "unread": 2,
        "discarded": {"empty": 1, "length": 2},
        "cached": 2,
        "agreement": 1.0,
    }
    rows = driver.judgements(sealed)
    assert [row["session_id"] for row in rows] == [first.session_id] * 5
    assert [row["item"] for row in rows] == ["q1", "length", "", "", ""]
    # a flow that missed the answer, and a data plane that was killed
    await driver.restart()
    assert await driver.seal_batch(0) == sealed
    later = await driver.seal_batch(1)
    assert [(row["session_id"], row["verdict"]) for row in driver.judgements(later)] == [
        (second.session_id, "5")
    ]
    assert "judges" not in later


async def test_a_run_without_judges_tells_nothing_of_them(driver: Driver) -> None:
    [session] = await answered(driver, **ALONE)
    await driver.to_score("s")
    await driver.report(session, status="finished", reward=1.0)
    sealed = await driver.seal_batch(0)
    assert not {"judgements", "judges", "noted", "unjudged"} & sealed.keys()
    data = driver.run.journal.path.read_bytes()
    assert b"finished" in data
    assert not [word for word in (b"judgements", b"unjudged") if word in data]


async def test_a_budget_that_is_spent_ends_the_run_until_it_is_raised(driver: Driver) -> None:
    fault = (
        "judge taste has used 30 tokens since the last batch, but "
        "environment.judges.taste.max_tokens_per_iteration is 20: raise this setting and resume the run"
    )
    first, second = await answered(driver, 2, judge_budgets={"taste": 20})
    await driver.leave(first)
    await driver.to_score("s")
    await driver.report_judged(first, status="finished", reward=1.0)
    assert driver.run.fault == ""
    await driver.report_judged(second, status="failed", cause="reward")
    assert driver.run.fault == fault
    assert await driver.claimed("a", 9) == []
    await driver.register(attempt=2, judge_budgets={"taste": 100})
    assert driver.run.fault == ""
    assert await driver.claimed("a", 9)


async def test_judges_of_a_group_that_its_function_drops_are_paid_too(driver: Driver) -> None:
    first, _ = await judged_together(driver)
    await driver.report_judged(first, status="failed", cause="group")
    assert driver.run.state.spent == {"taste": 10}


async def test_what_was_spent_before_a_restart_counts_until_the_next_batch(driver: Driver) -> None:
    first, second, *_ = await answered(driver, 2, **ALONE, judge_budgets={"taste": 25})
    await driver.leave(first)
    await driver.to_score("s")
    await driver.report_judged(first, status="finished", reward=1.0)
    await driver.restart()
    assert driver.run.state.spent == {"taste": 20}
    await driver.seal_batch(0)
    assert not driver.run.state.spent
    await driver.leave(driver.run.sessions[second.session_id])
    assert driver.run.fault == ""


# --- external agents


async def test_an_external_agent_leaves_nothing_unjudged(driver: Driver) -> None:
    await driver.register(**RULES, outside_groups=1)
    for session in (await driver.open(), (await driver.declared(2))[0]):
        with pytest.raises(WrongField, match="External agents cannot ask judges"):
            await driver.report(session, status="unjudged")
        with pytest.raises(WrongField, match="External agents cannot ask judges"):
            await driver.report_judged(session, status="finished", reward=1.0)


def test_a_report_whose_judgements_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$\[0\]\.tokens`"):
        FinishBody.model_validate({"status": "finished", "judgements": [{"tokens": "many"}]})


# --- whatever happens


@settings(max_examples=examples(60))
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=60))
async def test_no_answer_is_lost_or_scored_by_two_whatever_happens(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async with driving(model_dir, renderer) as driver:
        await driver.register(**RULES)
        sealed: list[str] = []
        for operation in operations:
            before = driver.ledger.next_batch
            await driver.do(operation)
            if driver.ledger.next_batch > before:
                sealed += [row["item"] for row in driver.judgements(driver.run.state.answers[before])]
            check(driver)
        await driver.check_restart()
        check(driver)
        held = [one.item for s in driver.run.sessions.values() for one in s.judgements]
        held += [one.item for r in driver.run.state.results.by_slot.values() for one in r.judgements]
        assert len(set(held + sealed)) == len(held + sealed), "each counts once"


def check(driver: Driver) -> None:
    """Each answer is with a runner, or waits for one, and is not tried for ever."""
    queued = driver.run.state.scoring._answers
    for session in driver.run.sessions.values():
        if session.answer is not None and session.claim is not None:
            assert bool(session.runner) == bool(session.scoring)
            assert bool(session.runner) or session in queued, "it waits for a runner"
            assert session.num_unjudged < 3
