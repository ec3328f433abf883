"""Groups that external agents declare: each finished session is in one batch, or is stored by itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import sweep_run
from sf_core.dataplane.runs.run import ServedRun
from storage.run_directory import RunDirectory
from storage.tables.trajectories import TrajectoryKind, read_trajectories, to_rows
from tests.bench.dataplane.run_driver import Driver, driving
from tests.bench.properties import examples

OPERATIONS = [
    *("declare", "declare", "finish_outside", "finish_outside", "finish_outside", "fail_outside"),
    *("answer_outside", "play", "play", "fail", "seal", "seal", "publish", "store", "restart"),
    *("begin_attempt", "go_on_after_release", "go_on_while_it_is_compacted_twice", "start_over"),
]

RULES: dict[str, Any] = {"outside_groups": 1, "groups_per_batch": 2}


def stored(run_dir: Path, kind: TrajectoryKind) -> Counter[str]:
    """Files that have rows of a session, by its id."""
    files = [uri for uris in RunDirectory(str(run_dir)).list_partitions(kind).values() for uri in uris]
    rows = [{row.session_id for row in to_rows(read_trajectories(uri))} for uri in files]
    return Counter(session_id for ids in rows for session_id in ids)


@settings(max_examples=examples(60))
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=40))
@example(operations=[*("declare", "finish_outside"), *["play"] * 4, "finish_outside", "seal", "start_over"])
@example(
    operations=[
        *("declare", "finish_outside", "declare", "finish_outside", "finish_outside", "fail_outside"),
        *("store", "go_on_while_it_is_compacted_twice"),
    ]
)
@example(operations=["declare", "answer_outside", "finish_outside", "start_over", "finish_outside", "store"])
@example(operations=["declare", *["finish_outside"] * 3, "go_on_after_release", *["play"] * 4, "seal"])
async def test_every_session_that_finished_is_in_one_batch_or_stored_by_itself_whatever_happens(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async with driving(model_dir, renderer) as driver:
        await driver.register(**RULES)
        await driver.do(*operations)
        await driver.check_restart()
        await driver.plane.release(driver.run)
        waiting = {result.session_id for result in driver.run.state.results.by_slot.values()}
        trained, kept = (stored(driver.folder / "run", kind) for kind in ("trajectories", "opened"))
        assert set(kept.values()) <= {1} and set(trained.values()) <= {1}
        assert not trained.keys() & kept.keys() and not waiting & (trained.keys() | kept.keys())
        assert driver.finished.keys() <= waiting | trained.keys() | kept.keys()


async def test_a_declared_group_is_trained_as_one_with_its_name_and_task(driver: Driver) -> None:
    await driver.register(**RULES | {"groups_per_batch": 1})
    first = await driver.declared(3, name="ticket 7", task_id="t7", environment="desk")
    assert await driver.declared(3, name="ticket 7") == first and len(first) == 3
    other = await driver.declared(3, name="ticket 8")
    assert {s.session_id for s in other}.isdisjoint(s.session_id for s in first)
    for number, session in enumerate(first):
        await driver.end(session, float(number))
    rows = driver.trajectories(await driver.seal_batch(0))
    assert {(row.group_id, row.task_id, row.environment) for row in rows} == {("run.g0", "t7", "desk")}
    assert sorted(row.reward for row in rows) == [0.0, 1.0, 2.0]


def expired(run: ServedRun, seconds: float) -> Any:
    run.state.serving_s += seconds
    return sweep_run(run, 0.0)


async def test_a_reward_may_come_as_late_as_its_patience_allows(driver: Driver) -> None:
    rules = {"groups_per_batch": 1, "session_timeout_s": 10.0, "reward_patience_s": 100.0}
    await driver.register(**RULES | rules)
    for session in await driver.declared(2):
        driver.sample(session)
        await driver.report(session, status="answered")
    await driver.restart()
    await expired(driver.run, 90.0)
    rated, _ = driver.outside
    await driver.report(rated, status="finished", reward=1.0)
    await expired(driver.run, 20.0)
    assert driver.outside == []
    assert driver.run.state.recent.last_error.endswith("got no reward within 100 s of its answer")
    assert driver.ledger.rejected == {0: "reward_error"}
    # what was rated is kept
    assert list(driver.run.state.results.external) == [rated.session_id]
    assert driver.run.counters["untrained_sessions"] == 1


async def test_a_reward_that_comes_after_the_lag_bound_is_kept_and_does_not_train(driver: Driver) -> None:
    await driver.register(**RULES | {"groups_per_batch": 1, "on_max_lag": "drop", "lag_bound": 0})
    late = await driver.declared(2)
    await driver.end(late[0])
    driver.sample(late[1])
    # a data plane that was told of a newer version meanwhile
    await driver.register(attempt=2, iteration=1, version=1)
    assert driver.ledger.rejected == {0: "started_over"}
    await driver.report(late[1], status="finished", reward=0.5)
    await driver.store()
    assert stored(driver.folder / "run", "opened") == {session.session_id: 1 for session in late}
    assert driver.run.counters["untrained_sessions"] == 2
