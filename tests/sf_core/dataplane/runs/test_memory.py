"""Runs whose sessions and results do not fit the memory of their data plane."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.api_schemas import ClaimBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.status import batch_status, evaluation_status, work_of
from sf_core.dataplane.runs import claiming, decide
from tests.bench import dataplane
from tests.bench.dataplane import planes
from tests.bench.waits import patience

KB = 1 / 1024
"""A kilobyte in MB."""

NOTHING = 0.001 * KB
"""A bound in MB that the first session exceeds."""

REASON = "of 0.0 MB held, so groups start one at a time: raise --memory-mb"


def count_begun(driver: dataplane.run_driver.Driver) -> int:
    """Number of groups begun that are not complete."""
    return sum(not group.is_complete for group in driver.ledger.groups.values())


def check_account(driver: dataplane.run_driver.Driver) -> None:
    """The account of what is held is exact."""
    state = driver.run.state
    results = [*state.results.by_slot.values(), *state.results.external.values()]
    for session in state.sessions.values():
        state.memory.update(session)
    held = [*state.sessions.values(), *results]
    assert driver.plane.memory.num_bytes == sum(item.num_bytes for item in held)


@settings(max_examples=30)
@given(
    bound_kb=st.sampled_from([0.001, 10, 20, 40]),
    operations=st.lists(
        st.sampled_from(
            ["claim", "finish", "fail", "lose", "play", "play", "seal", "seal", "publish", "restart"]
        ),
        max_size=40,
    ),
)
async def test_above_the_bound_is_only_what_groups_that_have_begun_add(
    model_dir: str, renderer: Renderer, bound_kb: float, operations: list[str]
) -> None:
    async with dataplane.run_driver.driving(model_dir, renderer) as driver:
        await driver.move("narrow", memory_mb=bound_kb * KB)
        await driver.register()
        for operation in operations:
            num_begun = count_begun(driver)
            was_full = driver.plane.memory.is_full
            await driver.do(operation)
            check_account(driver)
            # results may free memory and sessions fill it within one of the others
            if was_full and operation in ("claim", "finish", "fail", "lose"):
                assert count_begun(driver) <= max(num_begun, 1)


async def test_a_run_without_room_finishes_its_batches_and_says_why_it_is_slow(
    driver: dataplane.run_driver.Driver,
) -> None:
    await driver.move("narrow", memory_mb=NOTHING)
    await driver.register(gate="all", groups_per_batch=3)
    await driver.evaluate()
    manager = driver.ledger
    while manager.next_batch < 3:
        batch = manager.next_batch
        while not decide.readiness(manager, batch).ready:
            await driver.claim()
            assert count_begun(driver) <= 1 or not driver.plane.memory.is_full
            assert REASON in batch_status(driver.run, batch)["waiting_for"]
            await driver.finish()
        assert batch_status(driver.run, batch)["waiting_for"] == ""
        await driver.do("seal", "publish")
    assert manager.evaluations[0].is_complete


async def test_members_of_groups_that_have_begun_and_held_out_sessions_are_given_out_all_the_same(
    driver: dataplane.run_driver.Driver,
) -> None:
    await driver.move("narrow", memory_mb=NOTHING)
    await driver.register()
    first = await driver.claimed("a", 1)
    assert driver.plane.memory.is_full
    assert work_of(driver.run)["agent"] == 2, "no more runners are asked for than the group needs"
    others = await driver.claimed("b", 10)
    assert [s.claim.slot for s in (*first, *others) if s.claim] == [("train", 0, 0), ("train", 0, 1)]
    await driver.evaluate(3)
    held_out = await driver.claimed("b", 10, others[0].session_id)
    assert [s.claim.slot for s in held_out if s.claim] == [("holdout", 0, task) for task in range(3)]
    group = driver.ledger.evaluations[0]
    assert "memory" not in evaluation_status(driver.run, group)["waiting_for"]


async def test_a_claim_that_waits_for_memory_is_answered_when_another_run_gives_some_back(
    driver: dataplane.run_driver.Driver,
) -> None:
    await driver.move("narrow", memory_mb=4 * KB)
    await driver.register(run_id="other", run_dir=str(driver.folder / "other"), group_size=4)
    other = driver.plane.runs["other"]
    await driver.register(run_id="run", run_dir=str(driver.folder / "run"), group_size=1)
    [first] = await driver.claimed("a", 1)
    await claiming.claim(other, ClaimBody(runner="a", max=4))
    assert driver.plane.memory.is_full
    body = ClaimBody(runner=driver.runner, max=9, wait_s=600.0, running=[first.session_id])
    waiting = asyncio.ensure_future(claiming.claim(driver.run, body))
    await asyncio.sleep(0)
    assert not waiting.done()
    other.release()
    sessions, _ = await asyncio.wait_for(waiting, patience())
    assert sessions


def test_external_sessions_are_refused_until_there_is_room(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with planes.running_app(memory_mb=4 * KB) as url, planes.attended(url, tmp_path, model_dir) as plane:
        plane.register(group_size=1, groups_per_batch=1)
        plane.connect(lambda prompt, seed: renderer.encode("yes").tolist())
        opened = [plane.client.post("/sessions", {"run_id": "run"})["session_id"] for _ in range(2)]
        refused = plane.client.http.post("/sessions", json={"run_id": "run"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        error = refused.json()["error"]
        assert (error["code"], error["message"]) == (
            "memory_full",
            "No session can be opened now, because the data plane is at its memory limit (memory: 0.0 of 0.0 "
            "MB held): try again later, or start the data plane with more --memory-mb.",
        )
        [claim] = plane.claim()
        with ThreadPoolExecutor(1) as agent:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            path = f"/sessions/{claim['session_id']}"
            agent.submit(plane.post, f"{path}/v1/chat/completions", body, claim["key"]).result(patience())
        held = dataplane.figures.figures(plane)
        assert held["sf_memory_bytes",] > held["sf_memory_bound_bytes",] == 4096
        planes.finish(plane, claim)
        assert "sf_memory" in plane.http.get("/metrics").text
        for name in opened:
            plane.post(f"/sessions/{name}/finish", {"status": "failed"})
        plane.post("/runs/run/batches/0/seal", {"attempt": 1})
        assert dataplane.figures.figures(plane)["sf_memory_bytes",] == 0
        plane.client.post("/sessions", {"run_id": "run"})


@pytest.mark.parametrize("field", ["group", "task_id", "environment"])
def test_the_names_of_an_external_session_are_memory_too(tmp_path: Path, model_dir: str, field: str) -> None:
    with planes.running_app(memory_mb=1) as url, planes.attended(url, tmp_path, model_dir) as plane:
        plane.register()
        body = {"run_id": "run", field: "x" * 2**21}
        plane.client.post("/sessions", body)
        assert plane.client.http.post("/sessions", json=body).status_code == 429


@pytest.mark.parametrize(
    ("route", "report"),
    [
        ("finish", {"status": "answered", "answer": "x" * 2**21}),
        ("reward", {"reward": 1.0, "reward_parts": {"x" * 2**21: 1.0}}),
    ],
    ids=["an answer", "parts of a reward"],
)
def test_what_is_reported_of_an_open_session_is_memory_too(
    tmp_path: Path, model_dir: str, route: str, report: dict[str, Any]
) -> None:
    with planes.running_app(memory_mb=1) as url, planes.attended(url, tmp_path, model_dir) as plane:
        plane.register()
        opened = plane.client.post("/sessions", {"run_id": "run"})
        plane.client.post(f"/sessions/{opened['session_id']}/{route}", report)
        assert plane.client.http.post("/sessions", json={"run_id": "run"}).status_code == 429
