"""What runners spend until a batch is sealed, and whether engines waited meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sf_core.dataplane.api_schemas import MAX_INDEX, MAX_SPENT_S, ClaimBody, Spent
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.routing.router import Router
from sf_core.dataplane.routing.wait_queue import QueueLimits
from sf_core.dataplane.runs import claiming
from sf_core.dataplane.runs.runners import Effort
from sf_core.dataplane.sessions.session import Session
from sf_core.types import Endpoint, GenerationRequest, Sampling, Task, WeightsRef
from tests.bench import dataplane, runners
from tests.bench.stacks.echo_package import agent

BURNT_S = 0.5


def claim(plane: dataplane.planes.ServedPlane, most: int, **spent: float) -> list[dict[str, Any]]:
    body = {"runner": "a0:l1", "max": most, **({"spent": spent} if spent else {})}
    return list(plane.note_keys(plane.post("/runs/run/claim", body))["sessions"])


def test_the_effort_of_runners_is_in_the_batch_and_begins_anew_after_it(
    answering_plane: dataplane.planes.ServedPlane,
) -> None:
    effort = []
    claim(answering_plane, 0)
    # sums since the runner began
    for batch, (first, then) in enumerate([(1.5, 2.0), (2.25, 2.25)]):
        for session in claim(answering_plane, 4, cpu_s=first, busy_s=2 * first, num_ended=4 * batch):
            dataplane.planes.converse(answering_plane, session, 1, streamed=False)
            dataplane.planes.finish(answering_plane, session)
        claim(answering_plane, 0, cpu_s=then, busy_s=2 * then, num_ended=4 * (batch + 1))
        sealed = answering_plane.post(f"/runs/run/batches/{batch}/seal", {"attempt": 1})
        assert sealed["runners_seconds"] > 0
        effort.append(sealed["runners"])
    assert effort == [
        {"a0:l1": {"cpu_s": 2.0, "busy_s": 4.0, "num_ended": 4}},
        {"a0:l1": {"cpu_s": 0.25, "busy_s": 0.5, "num_ended": 4}},
    ]
    status = answering_plane.get("/runs/run")["runners"]["a0:l1"]
    assert (status["cpu_s"], status["num_ended"]) == (2.25, 8)


@pytest.mark.parametrize("name", ["cpu_s", "busy_s", "num_ended"])
def test_effort_below_nothing_is_refused(answering_plane: dataplane.planes.ServedPlane, name: str) -> None:
    body = {"runner": "a0:l1", "max": 0, "spent": {name: -1}}
    answer = answering_plane.http.post("/runs/run/claim", json=body)
    told = answer.json()["error"]["message"]
    assert (answer.status_code, told) == (400, f"spent.{name}: Input should be greater than or equal to 0")


@pytest.mark.parametrize("name", ["cpu_s", "busy_s", "num_ended"])
def test_more_effort_than_anybody_has_is_refused(
    answering_plane: dataplane.planes.ServedPlane, name: str
) -> None:
    body = {"runner": "a0:l1", "max": 0, "spent": {name: 1e18}}
    answer = answering_plane.http.post("/runs/run/claim", json=body)
    told = answer.json()["error"]["message"]
    assert answer.status_code == 400 and told.startswith(
        f"spent.{name}: Input should be less than or equal to"
    )
    assert answering_plane.get("/runs/run")["runners"] == {}


def test_a_claim_that_is_sent_again_counts_once() -> None:
    runner = Spent()
    told = Spent()
    for spent in (sums(1), sums(3), sums(3), sums(3), sums(4)):
        told = told + spent.since(runner)
        runner = spent
    assert told == sums(4)


def test_a_runner_that_begins_anew_under_its_name_begins_at_nothing() -> None:
    assert sums(1).since(sums(3)) == sums(1)


async def test_a_data_plane_that_starts_again_counts_nothing_that_was_spent_before(
    driver: dataplane.run_driver.Driver,
) -> None:
    await driver.register(group_size=1, groups_per_batch=1, gate="all")

    async def claim(most: int, **spent: float) -> list[Session]:
        body = ClaimBody(runner="a0:l1", max=most, spent=Spent(**spent))
        return (await claiming.claim(driver.run, body))[0]

    await claim(0)
    [session] = await claim(1, cpu_s=5.0)
    await driver.restart()
    await claim(0, cpu_s=6.0)
    await driver.end(driver.run.sessions[session.session_id])
    await claim(0, cpu_s=6.5, num_ended=1)
    sealed = await driver.seal_batch(0)
    assert sealed["runners"] == {"a0:l1": {"cpu_s": 0.5, "busy_s": 0.0, "num_ended": 1}}


def sums(number: int) -> Spent:
    return Spent(cpu_s=number, busy_s=2 * number, num_ended=3 * number)


def engine(version: int | None = 0, **state: Any) -> EngineConnection:
    state = {"version": version, "counted_at": time.monotonic(), **state}
    return EngineConnection("e", "l", "r0", 1, 8, lambda frame: None, **state)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def ask(engine: EngineConnection, name: str) -> None:
    engine.add_request(Generation(GenerationRequest(name, [1], 0, 1, (), Sampling()), floor=0), 0, 0)


def test_engines_are_free_while_they_serve_without_a_request(clock: list[float]) -> None:
    effort = Effort()
    asked = engine()
    others = [engine(), engine(None), engine(paused=True), engine(drain_reason="it trains")]
    ask(asked, "r")
    clock[0] += 1.0
    assert effort.totals([asked, *others])["engines_free"] == 0.5
    clock[0] += 1.0
    assert effort.totals([asked])["engines_free"] == 0.0
    assert effort.totals([asked])["engines_free"] is None


def test_requests_shorter_than_the_time_between_two_looks_are_counted(clock: list[float]) -> None:
    effort = Effort()
    asked = engine()
    for number in range(10):
        clock[0] += 0.25
        ask(asked, f"first {number}")
        clock[0] += 0.5
        ask(asked, f"second {number}")
        asked.remove_request(f"first {number}")
        clock[0] += 0.25
        asked.remove_request(f"second {number}")
    effort.record_engines([asked])
    assert effort.totals([])["engines_free"] == 0.25


async def test_an_engine_counts_no_time_before_its_weights_nor_of_a_pause_nor_after_it_was_told_to_leave(
    clock: list[float],
) -> None:
    router = Router(WeightsRef(0, ""), QueueLimits(8, 60.0, 60.0))
    effort = Effort()
    begun = engine(None)
    router.add(begun)
    clock[0] += 8.0
    router.confirm(begun, 0)
    clock[0] += 1.0
    ask(begun, "r")
    clock[0] += 3.0
    pause = asyncio.create_task(router.pause("freeze"))
    await asyncio.sleep(0)
    router.confirm_pause(begun)
    await pause
    clock[0] += 16.0
    router.resume()
    begun.remove_request("r")
    router.drain(begun, "it trains")
    clock[0] += 32.0
    assert effort.totals([begun])["engines_free"] == 0.25


def test_efforts_add_up() -> None:
    assert Spent(cpu_s=1, busy_s=2, num_ended=3) + Spent(cpu_s=4, busy_s=5, num_ended=6) == Spent(
        cpu_s=5, busy_s=7, num_ended=9
    )
    # each report may be as large as allowed
    most = Spent(cpu_s=MAX_SPENT_S, num_ended=MAX_INDEX)
    assert (most + most).num_ended == 2 * MAX_INDEX


def test_a_runner_tells_what_its_agents_compute(
    plane_process: dataplane.planes.ServedPlane, renderer: Renderer
) -> None:
    plane_process.register(group_size=1, groups_per_batch=2, num_batches=1)
    plane_process.connect(lambda prompt, seed: dataplane.planes.say(renderer, "42"))

    async def computing(task: Task, endpoint: Endpoint) -> str:
        until = time.thread_time() + BURNT_S
        while time.thread_time() < until:
            pass
        return await agent(task, endpoint)

    runners.run_until_ready(plane_process, runners.make_runner(plane_process.url, agent=computing))
    told = plane_process.get("/runs/run")["runners"]["a0"]
    assert told["cpu_s"] >= 2 * BURNT_S
