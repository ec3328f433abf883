"""Sessions that are prepared ahead, run and scored, each phase with a pool and a time of its own."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sf_core.agents.phases import Phases, Work
from sf_core.config import RolloutConfig
from sf_core.dataplane.api_schemas import ClaimBody, TaskName
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import sweep_run
from sf_core.dataplane.runs import claiming
from sf_core.process.user_code import name_function
from sf_core.types import Endpoint, Task
from tests import bench
from tests.bench.dataplane import planes
from tests.bench.stacks.echo_package import agent as ask


class Rooms:
    """Rooms that are prepared for agents, and how many are in which phase."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.prepared: Counter[str] = Counter()
        self.changed = asyncio.Condition()

    async def enter(self, phase: str) -> None:
        async with self.changed:
            self.now[phase] += 1
            self.most[phase] = max(self.most[phase], self.now[phase])
            self.changed.notify_all()

    async def leave(self, phase: str) -> None:
        async with self.changed:
            self.now[phase] -= 1
            self.changed.notify_all()

    async def until(self, what: Callable[[], bool]) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(what), bench.waits.patience())

    @asynccontextmanager
    async def prepare(self, task: Task) -> AsyncIterator[str]:
        self.prepared[task.task_id] += 1
        await self.enter("prepared")
        yield f"room of {task.task_id}"
        await self.leave("prepared")


def serve(plane: planes.ServedPlane, renderer: Renderer, **changes: Any) -> None:
    usual = {"group_size": 1, "groups_per_batch": 4, "num_batches": 1, "session_attempts": 1}
    plane.register(**usual | changes)
    plane.connect(lambda prompt, seed: planes.say(renderer, "42"))


def test_sessions_are_prepared_while_another_runs_and_what_was_prepared_ends_with_its_agent(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
) -> None:
    rooms = Rooms()

    async def agent(task: Task, endpoint: Endpoint, room: str) -> str:
        assert room == f"room of {task.task_id}"
        await rooms.enter("running")
        if len(rooms.prepared) < 4:
            # one that runs, two that are ready
            await rooms.until(lambda: rooms.now["prepared"] == 3)
        answer = await ask(task, endpoint)
        await rooms.leave("running")
        return answer

    async def reward(task: Task, answer: str) -> float:
        await rooms.enter("scored")
        await rooms.until(lambda: rooms.now["prepared"] < 3 or rooms.now["scored"] > 1)
        await rooms.leave("scored")
        return 1.0

    serve(plane_process, renderer, prepare_ahead=2)
    changes = {"agent": agent, "reward": reward, "prepare": rooms.prepare}
    bench.runners.run_until_ready(
        plane_process, bench.runners.make_runner(plane_process.url, concurrency=1, prepare_ahead=2, **changes)
    )
    assert rooms.most["running"] == 1
    assert rooms.most["prepared"] == 3
    assert rooms.now["prepared"] == 0
    assert plane_process.get("/runs/run")["counters"]["finished_sessions"] >= 4


@asynccontextmanager
async def unprepared(task: Task) -> AsyncIterator[None]:
    raise OSError("there is no disk")
    yield


@asynccontextmanager
async def slowly(task: Task) -> AsyncIterator[None]:
    await asyncio.sleep(60)
    yield


@asynccontextmanager
async def not_put_away(task: Task) -> AsyncIterator[None]:
    yield
    raise OSError("it is stuck")


async def agent_with_a_room(task: Task, endpoint: Endpoint, room: None) -> str:
    return await ask(task, endpoint)


async def score_slowly(task: Task, answer: str) -> float:
    await asyncio.sleep(60)
    return 1.0


async def time_out(task: Task, answer: str) -> float:
    raise TimeoutError("by itself")


async def silent(task: Task, endpoint: Endpoint) -> None:
    await ask(task, endpoint)


def strip(task: Task, answer: Any) -> float:
    return float(bool(answer.strip()))


def never_awaited(task: Task, endpoint: Endpoint) -> Any:
    return ask(task, endpoint)


def strips(task: Task, answers: list[Any]) -> list[float]:
    return [float(answer.strip() == "") for answer in answers]


def scores_nothing(task: Task, answer: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"),
    [
        ({"prepare": unprepared, "prepare_ahead": 0}, "prepare_error", "OSError: there is no disk"),
        ({"prepare": unprepared}, "prepare_error", "OSError: there is no disk"),
        ({"prepare": not_put_away}, "prepare_error", "OSError: it is stuck"),
        (
            {"prepare": slowly, "prepare_timeout_s": 0.1},
            *("prepare_error", "LateError: preparing took longer than rollout.prepare_timeout_s (0.1 s)"),
        ),
        (
            {"agent": ask, "reward": score_slowly, "score_timeout_s": 0.1},
            *("reward_error", "LateError: scoring took longer than rollout.score_timeout_s (0.1 s)"),
        ),
        ({"agent": ask, "reward": time_out}, "reward_error", "TimeoutError: by itself"),
        (
            {"agent": silent, "reward": strip},
            "reward_error",
            f"ValueError: the agent {name_function(silent)} returned None, for which the reward function "
            f"{name_function(strip)} raised AttributeError: 'NoneType' object has no attribute 'strip'",
        ),
        (
            {"agent": silent, "reward": scores_nothing},
            "reward_error",
            f"ValueError: the agent {name_function(silent)} returned None, for which the reward function "
            f"{name_function(scores_nothing)} returned None, which is not a finite number",
        ),
        (
            {"agent": never_awaited},
            "agent_error",
            f"TypeError: the agent {name_function(never_awaited)} returned a coroutine: "
            "define the function with `async def`, and `await` the coroutine in this function",
        ),
        (
            {"agent": ask, "reward": scores_nothing},
            "reward_error",
            f"ValueError: the reward function {name_function(scores_nothing)} returned None, "
            "which is not a finite number",
        ),
    ],
)
async def test_a_phase_that_fails_costs_its_session_with_a_reason_of_its_own(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
    changes: dict[str, Any],
    reason: str,
    sentence: str,
) -> None:
    changes = {"agent": agent_with_a_room, "prepare_ahead": 1} | changes
    serve(plane_process, renderer, groups_per_batch=1, prepare_ahead=changes["prepare_ahead"])
    async with asyncio.timeout(bench.waits.patience()):
        working = asyncio.ensure_future(bench.runners.make_runner(plane_process.url, **changes).run())
        counted = f"rejected_groups.{reason}"
        headers = planes.operator_headers(plane_process.url)
        async with httpx.AsyncClient(base_url=plane_process.url, headers=headers) as http:
            while counted not in (status := (await http.get("/runs/run")).json())["counters"]:
                assert not working.done()
                await asyncio.sleep(0.02)
            await http.post("/runs/run/release")
        await working
        assert status["last_error"].endswith(sentence)


async def test_what_is_ready_outlives_a_restart_of_the_data_plane(
    tmp_path: Path,
    model_dir: str,
    renderer: Renderer,
) -> None:
    rooms = Rooms()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = ["--journal-dir", str(tmp_path / "plane")]

    async def agent(task: Task, endpoint: Endpoint, room: str) -> str:
        await rooms.enter("running")
        await rooms.until(lambda: rooms.now["restarted"] > 0)
        return await ask(task, endpoint)

    async def work(plane: ExitStack, url: str) -> None:
        runner = bench.runners.make_runner(
            url, concurrency=1, prepare_ahead=2, agent=agent, prepare=rooms.prepare
        )
        working = asyncio.ensure_future(runner.run())
        await rooms.until(lambda: rooms.now["prepared"] == 3 and rooms.now["running"] == 1)
        before = dict(rooms.prepared)
        await asyncio.to_thread(plane.close)
        await asyncio.to_thread(plane.enter_context, planes.running_process(tmp_path / "port", port, *folder))
        await rooms.enter("restarted")
        with planes.attended(url, tmp_path, model_dir) as served_plane:
            await asyncio.to_thread(served_plane.connect, lambda prompt, seed: planes.say(renderer, "42"))
            while not (await asyncio.to_thread(served_plane.get, "/runs/run/batches/0?wait_s=10"))["ready"]:
                assert not working.done()
            await asyncio.to_thread(served_plane.post, "/runs/run/release")
            await working
        assert {task: rooms.prepared[task] for task in before} == dict.fromkeys(before, 1)

    with ExitStack() as plane:
        url = plane.enter_context(planes.running_process(tmp_path / "port", port, *folder))
        with planes.operator_client(url) as http:
            served_plane = planes.ServedPlane(url, http, tmp_path, model_dir)
            usual = {"group_size": 1, "groups_per_batch": 3, "num_batches": 1}
            served_plane.register(prepare_ahead=2, **usual)
        await asyncio.wait_for(work(plane, url), bench.waits.patience())


async def test_the_time_of_a_session_begins_with_its_agent_and_ends_with_it(
    tmp_path: Path,
    model_dir: str,
    renderer: Renderer,
) -> None:
    driver = bench.dataplane.run_driver.Driver(tmp_path, model_dir, renderer)

    async def wait(seconds: float) -> list[str]:
        """Ids of the sessions that are left when the run has served for so long."""
        driver.run.state.serving_s += seconds
        await sweep_run(driver.run, 0.0)
        return sorted(driver.run.sessions)

    await driver.register(prepare_ahead=2, session_timeout_s=10.0)
    await driver.claim()
    waiting, running, answered = await wait(20.0)
    named = {name: TaskName(task_id="t") for name in (running, answered)}
    await claiming.claim(driver.run, ClaimBody(runner=driver.runner, max=0, tasks=named))
    await claiming.claim(driver.run, ClaimBody(runner=driver.runner, max=0, answered=[answered]))
    assert await wait(9.0) == [waiting, running, answered]
    await driver.restart()
    assert await wait(9.0) == [waiting, running, answered]
    await claiming.claim(driver.run, ClaimBody(runner=driver.runner, max=0, answered=[answered]))
    assert await wait(2.0) == [waiting, answered]
    assert driver.run.counters["failures.timeout"] == 1
    await driver.plane.close()


async def test_a_reward_of_groups_that_needs_answers_names_the_agent_that_gives_none() -> None:
    phases = Phases(RolloutConfig(), silent, strip, None, strips)
    with pytest.raises(ValueError, match="returned None") as refused:
        await phases.judge([Work("s0"), Work("s1")], Task("t", "e", "?"), ["there", None])
    assert str(refused.value) == (
        f"the agent {name_function(silent)} returned None, for which the function group_reward "
        f"{name_function(strips)} raised AttributeError: 'NoneType' object has no attribute 'strip'"
    )


async def test_an_agent_that_returns_none_is_named_once_where_its_reward_needs_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def acts(task: Task, endpoint: Endpoint) -> None: ...

    phases = Phases(RolloutConfig(), acts, lambda task, answer: 1.0, None)
    nowhere = Endpoint("http://127.0.0.1:9/v1", "", "policy")

    async def work(name: str) -> float:
        answer = await phases.run(Work(name), task := Task("t", "e", "?"), nowhere)
        return float((await phases.score(Work(name), task, answer))["reward"])

    assert [await work(name) for name in ("s0", "s1")] == [1.0, 1.0]
    assert caplog.messages == [
        f"the agent {name_function(acts)} returned None: if the reward function needs an answer, the agent "
        "lacks a `return`"
    ]
