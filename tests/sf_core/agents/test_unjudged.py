"""Rewards that could not be had: answers are scored again, then left to others; what was asked is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
import pytest

from sf_core.agents import phases as phases_module
from sf_core.agents.judges.judges import Judge, Judges, endpoint_of
from sf_core.agents.phases import LateError, Phases, Work
from sf_core.agents.runner import _name_judgements
from sf_core.config import RolloutConfig
from sf_core.config.rollout_config import JudgeConfig
from sf_core.dataplane.api_schemas import FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.gateway.endpoint import MAX_BODY_BYTES
from sf_core.types import NotJudged, Scored, Task
from storage.tables.judgements import Judgement
from tests.bench import dataplane, waits
from tests.bench.judge_server import JudgeServer

TASK = Task("t", "e", "6 * 7?", "42")

Named = Mapping[str, Judge]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[JudgeServer]:
    with JudgeServer(getattr(request, "param", ())).serving() as served:
        yield served


async def scored(
    reward: Callable[..., Any],
    *,
    answer: Any = "42",
    server: JudgeServer | None = None,
    answers: list[Any] | None = None,
    timeout_s: float = waits.patience(),
) -> tuple[Any, list[list[Judgement]]]:
    """What a runner would report of an answer, or of those of a group, or the error that it would report; and
    what was asked, by answer."""
    configs = {} if server is None else {"taste": JudgeConfig(url=server.url)}
    works = [Work(f"s{number}") for number in range(len(answers or [answer]))]
    endpoints = {name: endpoint_of(name, config) for name, config in configs.items()}
    found: Any
    try:
        async with Judges(configs, endpoints) as judges:
            rules = RolloutConfig(score_timeout_s=timeout_s)
            phases = Phases(rules, agent, reward, None, reward, judges)
            if answers is None:
                found = await phases.score(works[0], TASK, answer)
            else:
                found = await phases.judge(works, TASK, answers)
    except Exception as error:
        found = error
    return found, [work.judgements for work in works]


def agent(task: Task, endpoint: Any) -> str:
    return "42"


def failing(times: int, then: Any = 1.0) -> Callable[..., Any]:
    """A reward function that is not judged so many times."""
    left = [times]

    def reward(task: Task, answer: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise NotJudged(f"{left[0]} left")
        return then

    return reward


@pytest.mark.parametrize("answer", ["42", None])
async def test_an_answer_that_is_not_judged_is_scored_again(answer: Any) -> None:
    assert (await scored(failing(3), answer=answer))[0] == {
        "reward": 1.0,
        "reward_parts": {},
        "step_rewards": {},
    }


@pytest.mark.parametrize("answer", ["42", None])
async def test_when_its_time_is_over_it_is_left_to_others(answer: Any) -> None:
    error, _ = await scored(failing(10**9), answer=answer, timeout_s=1.0)
    assert isinstance(error, NotJudged)
    assert "left" in str(error)


async def test_a_function_that_takes_too_long_by_itself_fails_as_ever() -> None:
    async def reward(task: Task, answer: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    error, _ = await scored(reward, timeout_s=0.05)
    assert isinstance(error, LateError)
    assert str(error) == "scoring took longer than rollout.score_timeout_s (0.05 s)"


async def wait_for_judge(task: Task, answer: Any, judges: Named) -> float:
    return float(await judges["taste"].ask("?", read=float))


def block_for_judge(task: Task, answer: Any, judges: Named) -> float:
    return float(judges["taste"].ask("?", read=float))


@pytest.mark.parametrize("server", [["slow"]], indirect=True)
@pytest.mark.parametrize("reward", [wait_for_judge, block_for_judge])
async def test_a_function_that_waits_for_a_judge_is_not_to_blame(
    server: JudgeServer, reward: Callable[..., Any]
) -> None:
    error, _ = await scored(reward, server=server, timeout_s=1.0)
    assert isinstance(error, NotJudged)
    assert str(error) == (
        "scoring took longer than rollout.score_timeout_s (1 s) while it waited for a judge"
    )


@pytest.mark.parametrize("server", [["garbage", "garbage", ""]], indirect=True)
@pytest.mark.parametrize("reward", [wait_for_judge, block_for_judge])
async def test_what_was_asked_is_told_of_all_times_that_it_was_scored(
    server: JudgeServer, reward: Callable[..., Any]
) -> None:
    found, [asked] = await scored(reward, server=server)
    assert found["reward"] == 1.0
    assert [one.verdict for one in asked] == [None, None, "1.0"]


async def test_what_was_asked_is_told_of_a_reward_that_fails(server: JudgeServer) -> None:
    async def reward(task: Task, answer: Any, judges: Named) -> Any:
        await judges["taste"].ask("?")
        return "much"

    error, [asked] = await scored(reward, server=server)
    assert "returned 'much', which is not a finite number" in str(error)
    assert len(asked) == 1


async def test_numbers_that_are_noted_are_no_part_of_the_reward() -> None:
    found, [noted] = await scored(failing(0, Scored({"right": 1.0}, noted={"length": 3})))
    assert found == {"reward": 1.0, "reward_parts": {"right": 1.0}, "step_rewards": {}}
    assert noted == [Judgement(item="length", verdict="3.0")]


async def test_a_noted_number_must_be_finite() -> None:
    error, [noted] = await scored(failing(0, Scored(1.0, noted={"length": float("inf")})))
    assert "returned inf as 'length', which is not a finite number" in str(error)
    assert noted == []


async def test_without_judges_a_function_has_what_its_parameter_has(server: JudgeServer) -> None:
    def reward(task: Task, answer: Any, judges: Named | None = None) -> float:
        return 1.0 if judges is None else 0.5

    assert (await scored(reward))[0]["reward"] == 1.0
    assert (await scored(reward, server=server))[0]["reward"] == 0.5


def test_a_report_keeps_the_texts_that_it_has_room_for() -> None:
    work = Work("s")
    work.judgements = [Judgement(judge="j", messages="x" * 2**20, tokens=7) for _ in range(20)]
    told = _name_judgements(work)["judgements"]
    assert [one["tokens"] for one in told] == [7] * 20
    assert [bool(one["messages"]) for one in told] == [True] * 3 + [False] * 17
    body = {"status": "finished", "reward": 1.0, "judgements": told}
    assert len(orjson.dumps(body)) < MAX_BODY_BYTES
    assert len(FinishBody.model_validate(body).judgements) == 20


async def test_answers_of_a_group_are_judged_together_again(server: JudgeServer) -> None:
    left = [1]

    def group_reward(task: Task, answers: list[Any], judges: Named) -> Any:
        won = judges["taste"].prefer("?", *answers)
        if left[0]:
            left[0] -= 1
            raise NotJudged("later")
        return [Scored(won, noted={"first": 1.0}), 1.0 - won]

    found, [first, second] = await scored(group_reward, server=server, answers=["long", "no"])
    assert [one["reward"] for one in found] == [1.0, 0.0]
    assert [one.judge for one in first] == ["taste"] * 4 + [None]
    assert [one.cached for one in first] == [False, False, True, True, False]
    assert second == []


async def test_a_group_that_is_dropped_is_no_failure() -> None:
    assert (await scored(lambda task, answers: None, answers=["a", "b"]))[0] is None


@pytest.mark.parametrize("judges_groups", [False, True])
def test_a_runner_has_its_answers_scored_again_until_they_are_judged(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer, judges_groups: bool
) -> None:
    served_plane.register(
        group_size=2, groups_per_batch=2, judges_groups=judges_groups, session_attempts=1000
    )
    served_plane.connect(lambda prompt, seed: dataplane.planes.say(renderer, "x"))
    judged = threading.Event()

    def reward(task: Task, answer: Any) -> Any:
        if not judged.is_set():
            raise NotJudged("the judge is away")
        return [1.0, 0.5] if judges_groups else 1.0

    dataplane.served_runs.run_runner(
        served_plane,
        "a0",
        "agent",
        rules=RolloutConfig(concurrency=4, score_timeout_s=1.0),
        reward=reward,
        group_reward=reward if judges_groups else None,
    )
    waits.wait_until(lambda: served_plane.get("/runs/run")["counters"].get("unjudged", 0) > 4)
    assert "NotJudged: the judge is away" in served_plane.get("/runs/run")["last_error"]
    judged.set()
    waits.wait_until(lambda: bool(served_plane.get("/runs/run/batches/0")["ready"]))
    status = served_plane.get("/runs/run")
    assert not {"failed_sessions", "retries"} & {name for name, n in status["counters"].items() if n}
    sealed = served_plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert sealed["rejected"] == {}
    assert sealed["reward_mean"] == (0.75 if judges_groups else 1.0)
