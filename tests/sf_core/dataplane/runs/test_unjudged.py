"""Answers that no judge could score: scored again, counted, and what becomes of them in the end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.bodies import ClaimBody, FinishBody, GroupBody, SessionBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.status import batch_status
from sf_core.dataplane.errors import WrongField
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.sessions.session import Session
from storage.files import FileRef
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tables.judgements import read_judgements
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.run_driver import Driver
from tests.properties import examples

OPERATIONS = ["take", "take", "answer", "answer", "leave", "leave_stale", "judge", "judge", "fail", "lose"]
OPERATIONS += ["seal", "publish", "restart", "begin_attempt", "compact", "score", "score", "score_locally"]


class UnjudgedDriver(Driver):
    """A run whose agents belong to runner `a`, and whose answers are scored by runners `s` and `t`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.questions = 0
        """Questions that judges were asked in reports that count."""

    async def register(self, **changes: Any) -> None:
        await super().register(**{"gate": "all", "session_attempts": 3, "scored_apart": True, **changes})

    async def claimed(self, name: str, limit: int, work: Any, *running: str) -> list[Session]:
        body = ClaimBody(runner=f"{name}{self.spec['attempt']}", max=limit, work=work, running=list(running))
        return (await claiming.claim(self.run, body))[0]

    def of(self, name: str) -> list[Session]:
        return [s for s in self.run.sessions.values() if s.runner == f"{name}{self.spec['attempt']}"]

    async def report(self, session: Session, **report: Any) -> None:
        self.questions += 1
        asked = {"judge": "taste", "item": f"q{self.questions}", "tokens": 10, "attempts": 1, "reply": "x"}
        body = {"judgements": [asked], "scoring": session.scoring, **report}
        await endings.finish(self.run, session, FinishBody.model_validate(body))

    async def take(self) -> None:
        at_work = [session.session_id for session in self.of("a")]
        for session in await self.claimed("a", 2, "agent", *at_work):
            assert session.answer is None, "agents' runners do not score"
            sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)

    async def answer(self) -> None:
        for session in [s for s in self.of("a") if s.answer is None][:1]:
            await endings.finish(self.run, session, FinishBody(status="answered", answer='"x"'))

    async def score(self) -> None:
        for name in ("s", "t"):
            given = [session.session_id for session in self.of(name)]
            await self.claimed(name, 1, "reward", *given)

    async def leave(self) -> None:
        """A runner could not have its answer judged."""
        for session in self.of("s")[:1]:
            await self.report(session, status="unjudged", answer='"x"', error="away")

    async def score_locally(self) -> None:
        """A runner of agents has scored an answer itself, which could not be judged."""
        for session in [s for s in self.of("a") if s.answer is None][:1]:
            await self.report(session, status="unjudged", answer='"x"', error="away")

    async def leave_stale(self) -> None:
        """The same is told again, or of an answer that another runner has by now."""
        for session in [s for s in self.run.sessions.values() if s.answer is not None][:1]:
            before = session.runner, session.num_unjudged, len(session.judgements)
            report = FinishBody(status="unjudged", answer='"x"', scoring="of before", judgements=[{}])
            await endings.finish(self.run, session, report)
            assert (session.runner, session.num_unjudged, len(session.judgements)) == before

    async def judge(self) -> None:
        for name in ("s", "t"):
            for session in self.of(name)[:1]:
                await self.report(session, status="finished", reward=1.0)

    async def lose(self) -> None:
        await self.claimed("t", 0, "reward")

    async def compact(self) -> None:
        await self.go_on_while_it_is_compacted_twice()

    async def finish(self) -> None:
        await self.judge()

    async def claim(self) -> None:
        await self.take()

    async def answered(self, number: int = 1) -> list[Session]:
        """So many sessions have answered."""
        sessions = []
        for _ in range(number):
            await self.take()
            await self.answer()
        sessions = [s for s in self.run.sessions.values() if s.answer is not None]
        return sessions[:number]

    async def unjudge(self, session: Session, times: int = 1) -> None:
        for _ in range(times):
            await self.claimed("s", 9, "reward")
            await self.report(session, status="unjudged", answer='"x"', error="away")

    def rows(self, sealed: dict[str, Any], stage: str = "rollout") -> list[dict[str, Any]]:
        """The table of judgements that the manifest of this answer names."""
        files = [FileRef(**ref) for ref in sealed.get("judgements", ())]
        manifest = Manifest(run_id="run", iteration=0, stage=stage, attempt=1, outputs=files)
        return read_judgements(RunDirectory(self.spec["run_dir"]), manifest).to_pylist()


Scenario = Callable[[UnjudgedDriver], Awaitable[None]]
Play = Callable[[Scenario], None]


@pytest.fixture
def play(tmp_path: Path, model_dir: str, renderer: Renderer) -> Play:
    return lambda scenario: with_driver(tmp_path, model_dir, renderer, scenario)


def with_driver(folder: Path, model_dir: str, renderer: Renderer, scenario: Scenario) -> None:
    async def run() -> None:
        driver = UnjudgedDriver(folder, model_dir, renderer)
        await driver.register()
        await scenario(driver)
        await driver.plane.close()

    asyncio.run(run())


@pytest.mark.parametrize("restarts", [False, True])
def test_an_answer_that_was_not_judged_is_given_to_the_next_runner(play: Play, restarts: bool) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        [session] = await driver.answered()
        await driver.unjudge(session)
        assert (session.runner, session.num_unjudged) == ("", 1)
        if restarts:
            await driver.restart()
        [again] = await driver.claimed("t", 9, "reward")
        assert (again.session_id, again.answer, again.num_unjudged) == (session.session_id, '"x"', 1)
        assert await driver.claimed("u", 9, "reward") == []
        assert driver.run.state.recent.last_error == "away"
        assert driver.run.counters["unjudged"] == 1
        assert driver.run.counters["failed_sessions"] == 0
        await driver.check_restart()

    play(scenario)


def test_what_is_told_twice_counts_once_and_takes_the_answer_from_nobody(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        [session] = await driver.answered()
        await driver.claimed("s", 9, "reward")
        told = FinishBody(
            status="unjudged", answer='"x"', scoring=session.scoring, judgements=[{"judge": "j"}]
        )
        await endings.finish(driver.run, session, told)
        await endings.finish(driver.run, session, told)
        assert (session.num_unjudged, len(session.judgements)) == (1, 1)
        assert await driver.claimed("s", 9, "reward") == [session]
        await endings.finish(driver.run, session, told)
        assert (session.num_unjudged, session.runner) == (1, "s1")

    play(scenario)


def test_a_runner_of_agents_leaves_its_answer_to_others_once(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.take()
        session = driver.of("a")[0]
        told = FinishBody(status="unjudged", answer='"mine"', output="log", judgements=[{"judge": "j"}])
        await endings.finish(driver.run, session, told)
        await endings.finish(driver.run, session, told)
        assert (session.answer, session.output, session.num_unjudged) == ('"mine"', "log", 1)
        assert await driver.claimed("s", 9, "reward") == [session]
        await driver.check_restart()

    play(scenario)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_goes_when_an_answer_of_it_could_never_be_judged(play: Play, restarts: bool) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        [session, *_] = await driver.answered(2)
        await driver.unjudge(session, 2)
        if restarts:
            await driver.restart()
            session = driver.run.sessions[session.session_id]
        assert driver.run.state.ledger.rejected == {}
        await driver.unjudge(session)
        assert driver.run.state.ledger.rejected == {0: "not_judged"}
        assert not driver.run.state.sessions_of("train", 0)
        await driver.check_restart()

    play(scenario)


def test_judges_that_never_answer_end_the_run(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.register(group_size=1, groups_per_batch=1, session_attempts=1)
        for _ in range(10):
            assert driver.run.fault == ""
            [session] = await driver.answered()
            await driver.unjudge(session)
        assert driver.run.fault == (
            "the last 10 groups were all dropped (not_judged 10), so no batch can be completed: check "
            "that the "
            "judges answer; the last error was away"
        )

    play(scenario)


def test_an_answer_that_its_runner_scores_is_not_ended_before_the_runner_has_told_of_it(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.register(score_timeout_s=5.0)
        waiting, given = await driver.answered(2)
        waiting.began_at = given.began_at = 0.0
        driver.run.state.serving_s = 4.0
        assert await driver.claimed("s", 1, "reward") == [waiting]
        driver.run.state.serving_s = 10.0
        await endings.end_expired(driver.run)
        assert waiting.session_id in driver.run.sessions, "it was given out at 4 s"
        assert given.session_id in driver.run.sessions, "no worker that serves the judges has it yet"
        driver.run.state.serving_s = 9.0 + endings.SCORING_GRACE_S + 0.1
        await endings.end_expired(driver.run)
        assert waiting.session_id not in driver.run.sessions

    play(scenario)


def test_an_answer_that_was_not_judged_before_is_ended_by_its_runner_alone(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        waiting, told = await driver.answered(2)
        await driver.unjudge(told)
        await driver.register(scored_apart=False, score_timeout_s=5.0)
        driver.run.state.serving_s = 100.0
        await endings.end_expired(driver.run)
        assert waiting.session_id not in driver.run.sessions
        assert driver.run.sessions[told.session_id].num_unjudged == 1

    play(scenario)


def test_without_a_runner_that_serves_its_judges_a_run_says_so(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.answered()
        said = batch_status(driver.run, 0)["waiting_for"]
        assert "no runner that scores and serves the judges is connected" in said
        await driver.claimed("s", 9, "reward")
        assert "no runner that scores" not in batch_status(driver.run, 0)["waiting_for"]

    play(scenario)


# --- held-out sessions


async def evaluated(driver: UnjudgedDriver, num_tasks: int) -> list[Session]:
    """The sessions of an evaluation, which have answered."""
    await driver.run.start_evaluation(0, num_tasks)
    return await driver.answered(num_tasks)


def test_a_held_out_session_that_was_not_judged_leaves_the_mean(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        first, second, third = await evaluated(driver, 3)
        await driver.claimed("s", 9, "reward")
        await driver.report(first, status="finished", reward=1.0)
        await driver.report(second, status="finished", reward=0.5)
        await driver.report(third, status="unjudged", error="away")
        await driver.unjudge(third, 2)
        assert driver.run.state.ledger.evaluations[0].is_complete
        await driver.check_restart()
        sealed = await driver.plane.sealers["run"].seal_evaluation(0, 1)
        assert sealed["reward_mean"] == 0.75
        assert (sealed["num_tasks"], sealed["unjudged"], sealed["sessions"]) == (3, 1, 3)
        assert (sealed["failed"], sealed["failures"], sealed["reward_min"]) == (0, {}, 0.5)
        directory = RunDirectory(driver.spec["run_dir"])
        [file] = sealed["files"]
        rows = pq.read_table(directory.path(file["uri"])).to_pylist()
        told = {row["session_id"]: (row["reward"], row["status"]) for row in rows}
        assert told[third.session_id] == (None, "not_judged")
        assert told[first.session_id] == (1.0, "finished")
        judged = driver.rows(sealed, "evaluate")
        assert [row["session_id"] for row in judged].count(third.session_id) == 3
        assert len(judged) == 5

    play(scenario)


def test_an_evaluation_of_which_nothing_was_judged_ends_the_run_and_is_judged_when_it_goes_on(
    play: Play,
) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        first, second = await evaluated(driver, 2)
        await driver.unjudge(first, 3)
        assert driver.run.fault == ""
        await driver.unjudge(second, 3)
        assert driver.run.fault == (
            "no answer of the evaluation of version 0 could be judged; each of 2 answers was tried 3 times: "
            "away. Check that the judges answer, then resume the run"
        )
        assert await driver.claimed("s", 9, "reward") == []
        await driver.register(attempt=2)
        given = await driver.claimed("s", 9, "reward")
        assert {session.session_id for session in given} == {first.session_id, second.session_id}
        await driver.report(given[0], status="finished", reward=1.0)
        await driver.report(given[1], status="unjudged", error="away")
        sealed = await driver.plane.sealers["run"].seal_evaluation(0, 2)
        assert (sealed["reward_mean"], sealed["unjudged"]) == (1.0, 1)

    play(scenario)


# --- answers that are scored together


async def judged_together(driver: UnjudgedDriver) -> list[Session]:
    await driver.register(judges_groups=True, group_size=2, groups_per_batch=1)
    await driver.answered(2)
    return await driver.claimed("s", 9, "reward")


@pytest.mark.parametrize("restarts", [False, True])
def test_answers_of_a_group_that_were_not_judged_are_scored_together_again(
    play: Play, restarts: bool
) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        first, second = await judged_together(driver)
        told = {"status": "unjudged", "answer": '"x"'}
        scoring = second.scoring
        await driver.report(first, **told)
        await driver.report(second, scoring=scoring, judgements=[], **told)
        assert [first.num_unjudged, second.num_unjudged] == [1, 1], "it counts once"
        if restarts:
            await driver.restart()
        again = await driver.claimed("t", 9, "reward")
        assert [session.session_id for session in again] == [first.session_id, second.session_id]
        assert not any(session.waits_for_group for session in again)
        assert await driver.claimed("u", 9, "reward") == []
        for session in again if restarts else ():
            # the journal does not have what this driver samples
            sample(session, driver.renderer, [user("hi")], say(driver.renderer, "x"), version=0)
        await driver.report(again[0], status="finished", reward=1.0)
        await driver.report(again[1], status="finished", reward=0.0, judgements=[])
        sealed = await driver.plane.sealers["run"].seal_batch(0, 1)
        assert [(row["session_id"], row["item"]) for row in driver.rows(sealed)] == [
            (first.session_id, "q1"),
            (first.session_id, "q3"),
        ]

    play(scenario)


def test_answers_that_were_scored_without_the_others_leave_no_group(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        first, second = await judged_together(driver)
        # told late by a runner that was lost
        await driver.report(first, status="finished", reward=1.0)
        await driver.report(second, status="unjudged")
        assert await driver.claimed("t", 9, "reward") == []
        assert driver.run.state.ledger.rejected == {0: "half_judged"}
        assert driver.run.state.spent == {"taste": 20}

    play(scenario)


def test_a_group_whose_answers_could_never_be_judged_together_goes(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        first, _ = await judged_together(driver)
        for _ in range(2):
            await driver.report(first, status="unjudged")
            await driver.claimed("s", 9, "reward")
        assert driver.run.state.ledger.rejected == {}
        await driver.report(first, status="unjudged")
        assert driver.run.state.ledger.rejected == {0: "not_judged"}

    play(scenario)


# --- what is stored


def test_judgements_are_a_table_of_the_batch_that_takes_their_sessions(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.register(group_size=1, groups_per_batch=1)
        first, second = await driver.answered(2)
        await driver.unjudge(first)
        await driver.claimed("s", 9, "reward")
        noted = {"item": "length", "verdict": "3"}
        asked = {"judge": "taste", "tokens": 5, "seconds": 2.0, "attempts": 2, "reply": "?"}
        pair = [
            {"judge": "taste", "pair": 7, "cached": True, "reply": "A", "verdict": '{"A": 0.9, "B": 0.1}'},
            {"judge": "taste", "pair": 7, "cached": True, "reply": "B", "verdict": '{"A": 0.2, "B": 0.8}'},
        ]
        asked |= {"discarded": ["length", "empty", "length"]}
        await driver.report(first, status="finished", reward=1.0, judgements=[noted, asked, *pair])
        await driver.report(second, status="finished", reward=1.0, judgements=[{**noted, "verdict": "5"}])
        counted = {"discarded_replies.length": 2, "discarded_replies.empty": 1}
        assert counted.items() <= driver.run.counters.items()
        await driver.restart()
        assert counted.items() <= driver.run.counters.items()
        sealed = await driver.plane.sealers["run"].seal_batch(0, 1)
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
        rows = driver.rows(sealed)
        assert [row["session_id"] for row in rows] == [first.session_id] * 5
        assert [row["item"] for row in rows] == ["q1", "length", "", "", ""]
        # a flow that missed the answer, and a data plane that was killed
        await driver.restart()
        assert await driver.plane.sealers["run"].seal_batch(0, 1) == sealed
        later = await driver.plane.sealers["run"].seal_batch(1, 1)
        assert [(row["session_id"], row["verdict"]) for row in driver.rows(later)] == [
            (second.session_id, "5")
        ]
        assert "judges" not in later

    play(scenario)


def test_a_run_without_judges_tells_nothing_of_them(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.register(group_size=1, groups_per_batch=1)
        [session] = await driver.answered()
        await driver.claimed("s", 9, "reward")
        await endings.finish(driver.run, session, FinishBody(status="finished", reward=1.0))
        sealed = await driver.plane.sealers["run"].seal_batch(0, 1)
        assert not {"judgements", "judges", "noted", "unjudged"} & sealed.keys()
        data = driver.run.journal.path.read_bytes()
        assert b"finished" in data
        assert not [word for word in (b"judgements", b"judge_budgets", b"unjudged") if word in data]

    play(scenario)


def test_a_budget_that_is_spent_ends_the_run_until_it_is_raised(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        fault = (
            "judge taste has used 30 tokens since the last batch, but "
            "environment.judges.taste.max_tokens_per_iteration is 20: raise this setting and resume the run"
        )
        await driver.register(judge_budgets={"taste": 20})
        first, second = await driver.answered(2)
        await driver.unjudge(first)
        await driver.claimed("s", 9, "reward")
        await driver.report(first, status="finished", reward=1.0)
        assert driver.run.fault == ""
        await driver.report(second, status="failed", cause="reward")
        assert driver.run.fault == fault
        assert await driver.claimed("a", 9, "agent") == []
        await driver.register(attempt=2, judge_budgets={"taste": 100})
        assert driver.run.fault == ""
        assert await driver.claimed("a", 9, "agent")

    play(scenario)


def test_judges_of_a_group_that_its_function_drops_are_paid_too(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        first, _ = await judged_together(driver)
        await driver.report(first, status="failed", cause="group")
        assert driver.run.state.spent == {"taste": 10}

    play(scenario)


def test_what_was_spent_before_a_restart_counts_until_the_next_batch(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.register(group_size=1, groups_per_batch=1, judge_budgets={"taste": 25})
        first, second, *_ = await driver.answered(2)
        await driver.unjudge(first)
        await driver.claimed("s", 9, "reward")
        await driver.report(first, status="finished", reward=1.0)
        await driver.restart()
        assert driver.run.state.spent == {"taste": 20}
        await driver.plane.sealers["run"].seal_batch(0, 1)
        assert not driver.run.state.spent
        await driver.unjudge(driver.run.sessions[second.session_id])
        assert driver.run.fault == ""

    play(scenario)


# --- agents outside


def test_an_agent_outside_leaves_nothing_unjudged(play: Play) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        await driver.register(outside_groups=1)
        opened = await claiming.open_session(driver.run, SessionBody(run_id="run"), by_operator=False)
        [declared, *_] = await claiming.declare_group(driver.run, GroupBody(size=2), by_operator=False)
        for session in (opened, declared):
            with pytest.raises(WrongField, match="Agents outside the cluster cannot ask judges"):
                await endings.finish(driver.run, session, FinishBody(status="unjudged"))
            with pytest.raises(WrongField, match="Agents outside the cluster cannot ask judges"):
                await driver.report(session, status="finished", reward=1.0)

    play(scenario)


def test_a_report_whose_judgements_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$\[0\]\.tokens`"):
        FinishBody.model_validate({"status": "finished", "judgements": [{"tokens": "many"}]})


# --- whatever happens


@settings(max_examples=examples(60), deadline=None)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=60))
def test_no_answer_is_lost_or_scored_by_two_whatever_happens(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async def scenario(driver: UnjudgedDriver) -> None:
        sealed: list[str] = []
        for operation in operations:
            before = driver.run.state.ledger.next_batch
            await getattr(driver, operation)()
            if driver.run.state.ledger.next_batch > before:
                sealed += [row["item"] for row in driver.rows(driver.run.state.answers[before])]
            check(driver)
        await driver.check_restart()
        check(driver)
        held = [one.item for s in driver.run.sessions.values() for one in s.judgements]
        held += [one.item for r in driver.run.state.results.by_place.values() for one in r.judgements]
        assert len(set(held + sealed)) == len(held + sealed), "each counts once"

    def check(driver: UnjudgedDriver) -> None:
        run = driver.run
        queued = run.state.scoring._answers
        for session in run.sessions.values():
            if session.answer is None or session.claim is None:
                continue
            assert bool(session.runner) == bool(session.scoring)
            assert bool(session.runner) or session in queued, "it waits for a runner"
            assert session.num_unjudged < 3

    with tempfile.TemporaryDirectory() as folder:
        with_driver(Path(folder), model_dir, renderer, scenario)
