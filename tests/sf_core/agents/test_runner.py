from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from sf_core.agents import runner as runner_module
from sf_core.agents.phases import as_reward, as_rewards
from sf_core.agents.runner import _describe_error
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control import plane as plane_module
from sf_core.dataplane.runs import claiming
from sf_core.types import Endpoint, Scored, Task
from storage.tables.trajectories import read_trajectories, to_rows
from tests import bench
from tests.bench import runners
from tests.bench.dataplane import planes


def test_the_parts_of_a_reward_add_up_to_it() -> None:
    parts = {"correct": 1.0, "short": 0.25}
    assert as_reward(parts, "f") == {"reward": 1.25, "reward_parts": parts, "step_rewards": {}}
    assert as_reward(True, "f") == {"reward": 1.0, "reward_parts": {}, "step_rewards": {}}


def test_rewards_of_single_answers_are_no_part_of_the_reward() -> None:
    scored = Scored({"correct": 1.0}, {"chatcmpl-a": 2})
    assert as_reward(scored, "f") == {
        "reward": 1.0,
        "reward_parts": {"correct": 1.0},
        "step_rewards": {"chatcmpl-a": 2.0},
    }


async def forgotten() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), "nan, which is not a finite number"),
        (None, "None, which is not a finite number"),
        ("1.0", "'1.0', which is not a finite number"),
        ([1.0, 2.0], "[1.0, 2.0], which is not a finite number"),
        ({}, "{}, which is not a finite number"),
        ({"a": 1.0, "b": float("inf")}, "inf as 'b', which is not a finite number"),
        ({"a": 1.0, "b": None}, "None as 'b', which is not a finite number"),
        (Scored(1.0, {"a": float("nan")}), "nan for 'a', which is not a finite number"),
        (
            forgotten(),
            "a coroutine: define the function with `async def`, and `await` the coroutine in this function",
        ),
    ],
)
def test_a_reward_that_is_no_finite_number_fails_its_session(value: object, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        as_reward(value, "my_agent:reward (my_agent.py:8)")
    assert str(refused.value) == f"the reward function my_agent:reward (my_agent.py:8) returned {told}"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1.0], "[1.0], expected a list with a reward for each of 2 answers"),
        (1.0, "1.0, expected a list with a reward for each of 2 answers"),
        ("ab", "'ab', expected a list with a reward for each of 2 answers"),
        ({"a": 1.0, "b": 1.0}, "{'a': 1.0, 'b': 1.0}, expected a list with a reward for each of 2 answers"),
        (
            forgotten(),
            "a coroutine: define the function with `async def`, and `await` the coroutine in this function",
        ),
    ],
)
def test_rewards_of_a_group_are_one_for_each_answer(values: object, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        as_rewards(values, 2, "my_agent:judge")
    assert str(refused.value) == f"the function group_reward my_agent:judge returned {told}"
    scored = [{"reward": 1.0, "reward_parts": {"a": 1.0}, "step_rewards": {}}] * 2
    assert as_rewards(({"a": 1.0} for _ in range(2)), 2, "f") == scored
    assert as_rewards(None, 2, "f") is None


class _DumbError(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_an_error_that_cannot_say_what_it_is_has_a_name_at_least() -> None:
    assert _describe_error(_DumbError(), "agent") == "_DumbError: (the error has no readable message)"


async def test_a_runner_gives_its_worker_back_when_the_data_plane_is_gone() -> None:
    runner = runners.make_runner("http://127.0.0.1:9", patience_s=0.1)
    sentence = r"^the data plane at http://127.0.0.1:9 did not answer any claim of a0 on run run for 0.1 s: "
    with pytest.raises(ConnectionError, match=sentence):
        await asyncio.wait_for(runner.run(), bench.waits.patience())


async def test_a_runner_gives_its_worker_back_when_the_data_plane_has_forgotten_its_run(
    plane_process: planes.ServedPlane,
) -> None:
    with pytest.raises(ConnectionError, match=r"on run .* for 0\.1 s: Client error '404 Not Found'"):
        await asyncio.wait_for(
            runners.make_runner(plane_process.url, patience_s=0.1).run(), bench.waits.patience()
        )


@pytest.mark.parametrize("key", ["key-of-the-run", None])
async def test_agents_get_the_key_of_their_session_and_nobody_else_gets_in(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
    key: str | None,
) -> None:
    plane_process.register(key=key, group_size=1, groups_per_batch=2, num_batches=1)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    endpoints: list[Endpoint] = []
    statuses: list[list[int]] = []

    async def keyed_agent(task: Task, endpoint: Endpoint) -> str:
        endpoints.append(endpoint)
        own = endpoint.base_url.removesuffix("/v1")
        asked = (f"{endpoint.base_url}/models", own, f"{plane_process.url}/runs/run")
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as keyed:
            statuses.append([(await keyed.get(url)).status_code for url in asked])
        return await bench.stacks.echo_package.agent(task, endpoint)

    runner = runners.make_runner(plane_process.url, agent=keyed_agent)
    async with asyncio.timeout(bench.waits.patience()):
        working = asyncio.ensure_future(runner.run())
        operator = planes.operator_headers(plane_process.url)
        async with httpx.AsyncClient(base_url=plane_process.url) as http:
            waited = {"params": {"wait_s": 10}, "headers": operator}
            while not (await http.get("/runs/run/batches/0", **waited)).json()["ready"]:
                assert not working.done()
            question = {"model": "policy", "messages": []}
            stranger = await http.post("/v1/chat/completions", json=question)
            assert stranger.status_code == (400 if key is None else 401)
            await http.post("/runs/run/release", headers=operator)
        await working
    keys = {endpoint.api_key for endpoint in endpoints}
    assert len(keys) == len(endpoints) >= 2
    assert keys.isdisjoint({"none", "key-of-the-run", plane_process.key})
    # its turns, and neither its tree nor its run
    assert statuses == [[200, 401, 401]] * len(endpoints)
    assert plane_process.get("/runs/run")["counters"].get("failed_sessions", 0) == 0


async def test_no_proxy_stands_between_agents_and_their_data_plane(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
    proxy: bench.proxies.SilentProxy,
) -> None:
    plane_process.register(group_size=1, groups_per_batch=1, num_batches=1)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    async with asyncio.timeout(bench.waits.patience()):
        working = asyncio.ensure_future(runners.make_runner(plane_process.url).run())
        while not (await asyncio.to_thread(plane_process.get, "/runs/run/batches/0?wait_s=10"))["ready"]:
            assert not working.done()
        await asyncio.to_thread(plane_process.post, "/runs/run/release")
        await working  # how many it counts depends on whether the answer to its last report came first
    assert not proxy.was_asked()


def test_a_runner_whose_agents_block_its_event_loop_is_heard_all_the_same(
    tmp_path: Path,
    model_dir: str,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence_s = bench.waits.patience(1.0)
    monkeypatch.setattr(claiming, "RUNNER_SILENCE_S", silence_s)
    monkeypatch.setattr(runner_module, "BEAT_S", 0.2)
    # between two looks a second apart, a runner would be silent for longer than the bound
    monkeypatch.setattr(plane_module, "SWEEP_S", 0.1)

    async def blocking_agent(task: Task, endpoint: Endpoint) -> str:
        answer = await bench.stacks.echo_package.agent(task, endpoint)
        time.sleep(2.5 * silence_s)
        return answer

    with planes.running_app() as url, planes.attended(url, tmp_path, model_dir) as plane:
        plane.register(group_size=1, groups_per_batch=1, num_batches=1)
        plane.connect(lambda prompt, seed: planes.say(renderer, "42"))
        runners.run_until_ready(plane, runners.make_runner(url, agent=blocking_agent, concurrency=1))
        assert "retries" not in plane.get("/runs/run")["counters"]


def test_of_failures_at_the_same_place_one_is_in_the_log(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane_process.register(group_size=1, groups_per_batch=2, num_batches=1, session_attempts=4)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    failed: list[str] = []

    async def failing_agent(task: Task, endpoint: Endpoint) -> str:
        if len(failed) < 3:
            failed.append(endpoint.base_url)
            raise ValueError(f"{endpoint.base_url} is not for me, nor is \udc80")
        return await bench.stacks.echo_package.agent(task, endpoint)

    with caplog.at_level(logging.WARNING, "sf_core.agents.runner"):
        runners.run_until_ready(plane_process, runners.make_runner(plane_process.url, agent=failing_agent))
    assert len(set(failed)) == 3
    [logged] = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert "ValueError" in logged and "nor is \\udc80" in logged


async def chatting_agent(task: Task, endpoint: Endpoint) -> str:
    """Agent that asks until its history is too long, or for one turn; it raises the errors of its SDK."""
    client = endpoint.client()
    messages: Any = [{"role": "user", "content": task.prompt}]
    while True:
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
        answer = reply.choices[0].message.content or ""
        if task.prompt == "short":
            return answer
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]


def test_the_session_of_an_agent_that_overflows_its_context_trains_with_its_group(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
) -> None:
    plane_process.register(
        group_size=2, groups_per_batch=1, num_batches=1, context_length=256, failed_reward=-1.0
    )
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    prompts = iter(["short", "long"])

    def tasks(split: str, index: int) -> Task:
        return Task("sum", "addition", next(prompts), "42")

    runner = runners.make_runner(plane_process.url, agent=chatting_agent, tasks=tasks)
    runners.run_until_ready(plane_process, runner)
    sealed = plane_process.post("/runs/run/batches/0/seal", {"attempt": 1})
    assert (sealed["failures"], sealed["rejected"]) == ({"context_overflow": 1}, {})
    rows = to_rows(read_trajectories(str(Path(plane_process.run_dir, "run", sealed["files"][0]["uri"]))))
    ended = {row.status: row for row in rows}
    assert ended["finished"].reward == 1.0
    failed = ended["context_overflow"]
    assert (failed.reward, failed.task_id, failed.environment) == (-1.0, "sum", "addition")
    # every answer up to there is trained: the last of them left no room for another question
    spans = [span for span in failed.turns if span.role == "assistant"]
    assert len(spans) > 3
    assert all(failed.loss_mask[span.start : span.end].all() for span in spans)
    assert failed.loss_mask.sum() == sum(span.end - span.start for span in spans)
    assert len(failed.token_ids) <= 256


async def end_the_program(task: Task, endpoint: Endpoint) -> str:
    sys.exit("no such tool")


async def cancel_itself(task: Task, endpoint: Endpoint) -> str:
    raise asyncio.CancelledError("no such tool")


def end_the_program_in_its_thread(task: Task, answer: str) -> float:
    sys.exit("no such tool")


@pytest.mark.parametrize("fault", [end_the_program, cancel_itself, end_the_program_in_its_thread])
def test_who_ends_the_program_or_cancels_itself_costs_one_session(
    tmp_path: Path,
    model_dir: str,
    renderer: Renderer,
    caplog: pytest.LogCaptureFixture,
    fault: Any,
) -> None:
    called: list[Task] = []

    async def faulty_agent(task: Task, endpoint: Endpoint) -> str:
        called.append(task)
        return await (fault if len(called) == 1 else bench.stacks.echo_package.agent)(task, endpoint)

    def faulty_reward(task: Task, answer: str) -> float:
        called.append(task)
        return fault(task, answer) if len(called) == 1 else 1.0

    changes = {"agent": faulty_agent} if asyncio.iscoroutinefunction(fault) else {"reward": faulty_reward}
    with planes.running_app() as url, planes.attended(url, tmp_path, model_dir) as plane:
        plane.register(group_size=1, groups_per_batch=1, num_batches=1)
        plane.connect(lambda prompt, seed: planes.say(renderer, "42"))
        runners.run_until_ready(plane, runners.make_runner(url, concurrency=1, **changes))
        assert plane.get("/runs/run")["counters"]["failed_sessions"] == 1
    assert len(called) == 2
    assert "failed: " in caplog.text and "no such tool" in caplog.text


async def test_a_plain_agent_that_hangs_keeps_neither_its_place_nor_its_runner(
    tmp_path: Path,
    model_dir: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "BEAT_S", 0.05)
    monkeypatch.setattr(runner_module, "LOOK_S", 0.05)
    begun: queue.Queue[str] = queue.Queue()
    over = threading.Event()
    came_to_an_end = threading.Event()

    def hanging_agent(task: Task, endpoint: Endpoint) -> None:
        begun.put(endpoint.base_url)
        over.wait(bench.waits.patience())
        came_to_an_end.set()

    async def work(url: str) -> None:
        working = asyncio.ensure_future(runners.make_runner(url, agent=hanging_agent, concurrency=1).run())
        first = await asyncio.to_thread(begun.get, timeout=bench.waits.patience())
        async with httpx.AsyncClient(base_url=url, headers=planes.operator_headers(url)) as http:
            # the data plane ends it, as one that ran too long
            await http.post(first.removesuffix("/v1") + "/finish", json={"status": "failed"})
            assert await asyncio.to_thread(begun.get, timeout=bench.waits.patience()) != first
            await http.post("/runs/run/release")
        await working

    with planes.running_app() as url, planes.attended(url, tmp_path, model_dir) as plane:
        plane.register(group_size=1, groups_per_batch=1)
        await asyncio.wait_for(work(url), bench.waits.patience())
    assert not came_to_an_end.is_set()
    over.set()


async def test_a_runner_that_cannot_report_any_more_ends_with_the_reason() -> None:
    runner = runners.make_runner("http://127.0.0.1:9")

    async def fail(http: httpx.AsyncClient) -> None:
        raise TypeError("what it could not do")

    runner._reports.send = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError, match="what it could not do"):
        await asyncio.wait_for(runner.run(), bench.waits.patience())
