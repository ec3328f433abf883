"""A run reopened from its journal equals the run that wrote it, whatever happened."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.bodies import ClaimBody, FinishBody, SessionBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.runs.claiming import open_session
from sf_core.dataplane.runs.events import Finished
from sf_core.dataplane.sessions.finished import FinishedSession
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.run_driver import OPERATIONS, Driver
from tests.properties import examples


@settings(max_examples=examples(50), deadline=None)
@given(
    operations=st.lists(
        st.sampled_from([*OPERATIONS, "restart", "begin_attempt", "go_on_after_release", "begin_anew"]),
        max_size=40,
    )
)
@example(operations=["play", "go_on_after_release", *["play"] * 4, "seal"])
@example(operations=["play", "begin_attempt", *["play"] * 4, "seal", "claim", "lose"])
@example(operations=["claim", "go_on_while_it_is_compacted_twice"])
@example(operations=["evaluate", "play", "begin_anew", "evaluate", "play", "begin_attempt", "claim"])
@example(operations=["evaluate", "begin_anew", "go_on_while_it_is_compacted_twice"])
@example(operations=["evaluate", "play", "begin_anew", "evaluate", "go_on_while_it_is_compacted_twice"])
@example(operations=["pause", "pause_engine", *["play"] * 4, "seal", "restart", "resume"])
@example(operations=["play", "claim", "finish", "go_on_after_release", "claim", "play", "seal"])
def test_a_run_opened_from_its_journal_is_the_run_that_wrote_it(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async def scenario(folder: Path) -> None:
        driver = Driver(folder, model_dir, renderer)
        await driver.register()
        for operation in operations:
            await getattr(driver, operation)()
        await driver.check_restart()
        before = driver.state()
        # a flow that comes back at the batch it is in finds what it left
        await driver.register(iteration=driver.run.state.ledger.next_batch, version=driver.version)
        assert driver.state() == before
        await driver.plane.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


@pytest.mark.parametrize(("group_size", "num_kept"), [(4, 3), (3, 0)], ids=["begun", "complete and too old"])
def test_a_run_that_starts_over_finds_its_results_also_when_that_is_replayed(
    tmp_path: Path, model_dir: str, renderer: Renderer, group_size: int, num_kept: int
) -> None:
    async def scenario() -> None:
        driver = Driver(tmp_path, model_dir, renderer)
        await driver.register(group_size=group_size, groups_per_batch=4, gate="all")
        await driver.play()
        assert len(driver.run.state.results.by_place) == 3
        for attempt, folder in ((2, "another"), (3, "third")):
            await driver.plane.close()
            driver.plane = DataPlane(DataplaneOptions(str(tmp_path / folder)))
            await driver.register(attempt=attempt, iteration=5)
            results = driver.run.state.results.by_place
            assert [len(result.trajectories) for result in results.values()] == [1] * num_kept
            held = [*results.values(), *driver.run.sessions.values()]
            assert driver.plane.memory.num_bytes == sum(item.num_bytes for item in held)
        await driver.plane.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("restarts", ["never", "before", "after"])
def test_nothing_that_a_run_did_before_it_began_anew_counts(
    tmp_path: Path, model_dir: str, renderer: Renderer, restarts: str
) -> None:
    """Another version 0, tasks or seed: groups and evaluations begin again, under names that no agent has."""

    async def scenario() -> None:
        driver = Driver(tmp_path, model_dir, renderer)
        await driver.register(group_size=2, groups_per_batch=1, gate="all", origin="first")
        await driver.run.start_evaluation(0, 1)
        earlier = driver.run
        [held_out, done, open_one], _ = await claiming.claim(earlier, ClaimBody(runner="a", max=3))
        for session in (held_out, done):
            await endings.finish(earlier, session, FinishBody(status="finished", reward=1.0))
        outside = await open_session(earlier, SessionBody(run_id="run"), by_operator=False)
        sample(outside, renderer, [user("hi")], say(renderer, "x"), version=0)
        await endings.finish(earlier, outside, FinishBody(status="finished", reward=1.0))
        if restarts == "before":
            await driver.restart()
        await driver.register(attempt=2, origin="second")
        run = driver.run
        with pytest.raises(ApiError, match="superseded"):
            await driver.register(attempt=1)
        # an end that the journal takes late
        late = FinishedSession(open_one.session_id, open_one.claim, 1.0, "", None, None, [])
        await run.record_now(Finished(late))
        if restarts == "after":
            await driver.restart()
            run = driver.run
        assert (run.state.results.by_place, [*run.state.results.opened]) == ({}, [outside.session_id])
        assert (run.state.ledger.groups, run.state.ledger.evaluations, run.sessions) == ({}, {}, {})
        await run.start_evaluation(0, 1)
        sessions, _ = await claiming.claim(run, ClaimBody(runner="b", max=3))
        assert [one.session_id for one in sessions] == ["run.e0.0.a1", "run.g0.0.a1", "run.g0.1.a1"]
        assert [one.claim.draw for one in sessions if one.claim] == [0, 0, 0]
        await driver.plane.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("knows_its_runs", [True, False])
@pytest.mark.parametrize("committed", [2, 1, 0])
def test_after_the_loss_of_all_processes_the_flow_decides_where_to_go_on(
    tmp_path: Path, model_dir: str, renderer: Renderer, committed: int, knows_its_runs: bool
) -> None:
    """Two batches were sealed. A flow that committed both or one goes on; one that lost both starts over
    with the finished sessions that are left."""

    async def scenario() -> None:
        driver = Driver(tmp_path, model_dir, renderer)
        await driver.register(group_size=1, groups_per_batch=1, gate="all")
        for _ in range(2):
            for operation in ("claim", "finish", "seal", "publish"):
                await getattr(driver, operation)()
        await driver.claim()
        await driver.finish()
        if knows_its_runs:
            await driver.restart()
        else:
            await driver.plane.close()
            driver.plane = DataPlane(DataplaneOptions(str(tmp_path / "another")))
        done = list(range(committed))
        await driver.register(attempt=2, iteration=committed, version=committed, done_groups=done)
        with pytest.raises(ApiError, match="superseded"):
            await driver.register(attempt=1)
        sealed = await driver.plane.sealers["run"].seal_batch(1, 2) if committed else None
        if committed == 1:
            assert sealed is not None and sealed["groups"] == [1]
        if committed == 0:
            # the first group is gone with its journal: it is done again, the others are still there
            assert driver.run.state.ledger.next_batch == 0
            assert sorted(place.group for place in driver.run.state.results.by_place) == [1, 2]
        sessions, _ = await claiming.claim(driver.run, ClaimBody(runner="b", max=1))
        assert sessions[0].session_id == {2: "run.g3.0.a1", 1: "run.g3.0.a1", 0: "run.g0.0.a1"}[committed]
        await driver.plane.close()

    asyncio.run(scenario())
