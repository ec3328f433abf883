"""A run reopened from its journal equals the run that wrote it, whatever happened."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.runs.events import Finished
from sf_core.dataplane.sessions.finished import FinishedSession
from tests.bench.dataplane import run_driver
from tests.bench.properties import examples

MORE = ["restart", "begin_attempt", "go_on_after_release", "begin_anew", "name_task", "overflow"]


@settings(max_examples=examples(50))
@given(operations=st.lists(st.sampled_from([*run_driver.OPERATIONS, *MORE]), max_size=40))
@example(operations=["claim", "name_task", "overflow"])
@example(operations=["play", "go_on_after_release", *["play"] * 4, "seal"])
@example(operations=["play", "begin_attempt", *["play"] * 4, "seal", "claim", "lose"])
@example(operations=["claim", "go_on_while_it_is_compacted_twice"])
@example(operations=["evaluate", "play", "begin_anew", "evaluate", "play", "begin_attempt", "claim"])
@example(operations=["evaluate", "begin_anew", "go_on_while_it_is_compacted_twice"])
@example(operations=["evaluate", "play", "begin_anew", "evaluate", "go_on_while_it_is_compacted_twice"])
@example(operations=["pause", "pause_engine", *["play"] * 4, "seal", "restart", "resume"])
@example(operations=["play", "claim", "finish", "go_on_after_release", "claim", "play", "seal"])
async def test_a_run_opened_from_its_journal_is_the_run_that_wrote_it(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async with run_driver.driving(model_dir, renderer) as driver:
        await driver.register()
        await driver.do(*operations)
        await driver.check_restart()
        before = driver.state()
        # a flow that comes back at the batch it is in finds what it left
        await driver.register(iteration=driver.ledger.next_batch, version=driver.version)
        assert driver.state() == before


@pytest.mark.parametrize(("group_size", "num_kept"), [(4, 3), (3, 0)], ids=["begun", "complete and too old"])
async def test_a_run_that_starts_over_finds_its_results_also_when_that_is_replayed(
    driver: run_driver.Driver, group_size: int, num_kept: int
) -> None:
    await driver.register(group_size=group_size, groups_per_batch=4, gate="all")
    await driver.play()
    assert len(driver.run.state.results.by_slot) == 3
    for attempt, folder in ((2, "another"), (3, "third")):
        await driver.move(folder)
        await driver.register(attempt=attempt, iteration=5)
        results = driver.run.state.results.by_slot
        assert [len(result.trajectories) for result in results.values()] == [1] * num_kept
        held = [*results.values(), *driver.run.sessions.values()]
        assert driver.plane.memory.num_bytes == sum(item.num_bytes for item in held)


@pytest.mark.parametrize("restarts", ["before", "after"])
async def test_nothing_that_a_run_did_before_it_began_anew_counts(
    driver: run_driver.Driver, restarts: str
) -> None:
    """Another version 0, tasks or seed: groups and evaluations begin again, under names that no agent has."""
    await driver.register(group_size=2, groups_per_batch=1, gate="all", origin="first")
    await driver.evaluate(1)
    [held_out, done, open_one] = await driver.claimed("a", 3)
    for session in (held_out, done, outside := await driver.open()):
        await driver.end(session)
    if restarts == "before":
        await driver.restart()
    await driver.register(attempt=2, origin="second")
    with pytest.raises(ApiError, match="superseded"):
        await driver.register(attempt=1)
    # an end that the journal takes late
    late = FinishedSession(open_one.session_id, open_one.claim, 1.0, "", None, None, [])
    await driver.run.record_now(Finished(late))
    if restarts == "after":
        await driver.restart()
    state = driver.run.state
    assert (state.results.by_slot, [*state.results.external]) == ({}, [outside.session_id])
    assert (state.ledger.groups, state.ledger.evaluations, state.sessions) == ({}, {}, {})
    await driver.evaluate(1)
    sessions = await driver.claimed("b", 3)
    assert [one.session_id for one in sessions] == ["run.e0.0.a1", "run.g0.0.a1", "run.g0.1.a1"]
    assert [one.claim.draw for one in sessions if one.claim] == [0, 0, 0]


@pytest.mark.parametrize("knows_its_runs", [True, False])
@pytest.mark.parametrize("committed", [2, 1, 0])
async def test_after_the_loss_of_all_processes_the_flow_decides_where_to_go_on(
    driver: run_driver.Driver, committed: int, knows_its_runs: bool
) -> None:
    """Two batches were sealed. A flow that committed both or one goes on; one that lost both starts over
    with the finished sessions that are left."""
    await driver.register(group_size=1, groups_per_batch=1, gate="all")
    await driver.do(*["claim", "finish", "seal", "publish"] * 2, "claim", "finish")
    if knows_its_runs:
        await driver.restart()
    else:
        await driver.move("another")
    done = list(range(committed))
    await driver.register(attempt=2, iteration=committed, version=committed, done_groups=done)
    with pytest.raises(ApiError, match="superseded"):
        await driver.register(attempt=1)
    sealed = await driver.seal_batch(1) if committed else {}
    if committed == 1:
        assert sealed["groups"] == [1]
    if committed == 0:
        # the first group is gone with its journal: it is done again, the others are still there
        assert (driver.ledger.next_batch, driver.ledger.next_group) == (0, 0)
        assert sorted(place.group for place in driver.run.state.results.by_slot) == [1, 2]
    [session] = await driver.claimed("b", 1)
    assert session.session_id == "run.g3.0.a1", "what was given out is given out again first"
    if committed == 0:
        await driver.do("seal", "publish", "seal", "publish")
        sessions = await driver.claimed("b", 9)
        ids = [session.session_id for session in sessions]
        assert ids == ["run.g0.0.a0", "run.g3.0.a2"], "before those that come after it"
