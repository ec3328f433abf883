"""Groups that agents outside declare: each finished session is in one batch, or is stored by itself."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.bodies import FinishBody, GroupBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import sweep_run
from sf_core.dataplane.runs import endings
from sf_core.dataplane.runs.claiming import declare_group
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.session import Session
from storage.run_directory import RunDirectory
from storage.tables.trajectories import TrajectoryKind, read_trajectories, to_rows
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.run_driver import Driver
from tests.properties import examples

OPERATIONS = [
    *("declare", "declare", "finish_outside", "finish_outside", "finish_outside", "fail_outside", "answer"),
    *("play", "play", "fail", "seal", "seal", "publish", "store", "restart", "begin_attempt"),
    *("go_on_after_release", "go_on_while_it_is_compacted_twice", "start_over"),
]


class OutsideDriver(Driver):
    """A run of which one group in two is from outside."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finished: set[str] = set()

    @property
    def given_out(self) -> list[Session]:
        return [session for session in self.run.sessions.values() if not session.is_external]

    @property
    def outside(self) -> list[Session]:
        return [session for session in self.run.sessions.values() if session.is_external]

    async def declare(self) -> None:
        await declare_group(
            self.run, GroupBody(size=1 + next(self.numbers) % 3, task_id="t"), by_operator=False
        )

    async def finish_outside(self) -> None:
        for session in self.outside[next(self.numbers) % 3 :][:1]:
            sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)
            self.finished.add(session.session_id)
            reward = float(next(self.numbers) % 2)
            await endings.finish(self.run, session, FinishBody(status="finished", reward=reward))

    async def fail_outside(self) -> None:
        for session in self.outside[-1:]:
            await endings.finish(self.run, session, FinishBody(status="failed"))

    async def answer(self) -> None:
        for session in self.outside[:1]:
            await endings.finish(self.run, session, FinishBody(status="answered"))

    async def store(self) -> None:
        await self.plane.stores["run"].store()

    async def start_over(self) -> None:
        """The flow goes on at a batch that the data plane has never heard of."""
        iteration = self.run.state.ledger.next_batch + 2
        attempt = self.spec["attempt"] + 1
        await self.register(attempt=attempt, iteration=iteration, version=max(iteration, self.version))

    def state(self) -> dict[str, Any]:
        opened = self.run.state.results.opened
        answered = sorted(s.session_id for s in self.outside if s.answer is not None)
        # starting over may find another reason for which a group had to go
        rejected = sorted(self.run.state.ledger.rejected)
        return super().state() | {"opened": list(opened), "answered": answered, "rejected": rejected}


def stored(run_dir: Path, kind: TrajectoryKind) -> Counter[str]:
    """Files that have rows of a session, by its id."""
    files = [uri for uris in RunDirectory(str(run_dir)).list_partitions(kind).values() for uri in uris]
    rows = [{row.session_id for row in to_rows(read_trajectories(uri))} for uri in files]
    return Counter(session_id for ids in rows for session_id in ids)


async def begun(folder: Path, model_dir: str, renderer: Renderer, **rules: Any) -> OutsideDriver:
    driver = OutsideDriver(folder, model_dir, renderer)
    await driver.register(**{"outside_groups": 1, "groups_per_batch": 2, **rules})
    return driver


@settings(max_examples=examples(60), deadline=None)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=40))
@example(operations=[*("declare", "finish_outside"), *["play"] * 4, "finish_outside", "seal", "start_over"])
@example(
    operations=[
        *("declare", "finish_outside", "declare", "finish_outside", "finish_outside", "fail_outside"),
        *("store", "go_on_while_it_is_compacted_twice"),
    ]
)
@example(operations=["declare", "answer", "finish_outside", "start_over", "finish_outside", "store"])
@example(operations=["declare", *["finish_outside"] * 3, "go_on_after_release", *["play"] * 4, "seal"])
def test_every_session_that_finished_is_in_one_batch_or_stored_by_itself_whatever_happens(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async def scenario(folder: Path) -> None:
        driver = await begun(folder, model_dir, renderer)
        for operation in operations:
            await getattr(driver, operation)()
        await driver.check_restart()
        await driver.plane.release(driver.run)
        waiting = {result.session_id for result in driver.run.state.results.by_place.values()}
        trained, kept = (stored(folder / "run", kind) for kind in ("trajectories", "opened"))
        assert set(kept.values()) <= {1} and set(trained.values()) <= {1}
        assert not trained.keys() & kept.keys() and not waiting & (trained.keys() | kept.keys())
        assert driver.finished <= waiting | trained.keys() | kept.keys()
        await driver.plane.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


def test_a_declared_group_is_trained_as_one_with_its_name_and_task(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario() -> None:
        driver = await begun(tmp_path, model_dir, renderer, groups_per_batch=1)
        first = await declare_group(
            driver.run,
            GroupBody(size=3, name="ticket 7", task_id="t7", environment="desk"),
            by_operator=False,
        )
        again = await declare_group(driver.run, GroupBody(size=3, name="ticket 7"), by_operator=False)
        assert again == first and len(first) == 3
        other = await declare_group(driver.run, GroupBody(size=3, name="ticket 8"), by_operator=False)
        assert {s.session_id for s in other}.isdisjoint(s.session_id for s in first)
        for number, session in enumerate(first):
            sample(session, renderer, [user("hi")], say(renderer, "x"), version=0)
            await endings.finish(driver.run, session, FinishBody(status="finished", reward=float(number)))
        await driver.seal()
        [uris] = RunDirectory(str(tmp_path / "run")).list_partitions("trajectories").values()
        rows = to_rows(read_trajectories(uris[0]))
        assert {(row.group_id, row.task_id, row.environment) for row in rows} == {("run.g0", "t7", "desk")}
        assert sorted(row.reward for row in rows) == [0.0, 1.0, 2.0]
        await driver.plane.close()

    asyncio.run(scenario())


def expired(run: ServedRun, seconds: float) -> Any:
    run.state.serving_s += seconds
    return sweep_run(run, 0.0)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_reward_may_come_as_late_as_its_patience_allows(
    tmp_path: Path, model_dir: str, renderer: Renderer, restarts: bool
) -> None:
    async def scenario() -> None:
        rules = {"groups_per_batch": 1, "session_timeout_s": 10.0, "reward_patience_s": 100.0}
        driver = await begun(tmp_path, model_dir, renderer, **rules)
        for session in await declare_group(driver.run, GroupBody(size=2), by_operator=False):
            sample(session, renderer, [user("hi")], say(renderer, "x"), version=0)
            await endings.finish(driver.run, session, FinishBody(status="answered"))
        if restarts:
            await driver.restart()
        await expired(driver.run, 90.0)
        rated, _ = driver.outside
        if restarts:
            sample(rated, renderer, [user("hi")], say(renderer, "x"), version=0)
        await endings.finish(driver.run, rated, FinishBody(status="finished", reward=1.0))
        await expired(driver.run, 20.0)
        assert driver.outside == []
        assert driver.run.state.recent.last_error.endswith("got no reward within 100 s of its answer")
        assert driver.run.state.ledger.rejected == {0: "reward_error"}
        # what was rated is kept
        assert list(driver.run.state.results.opened) == [rated.session_id]
        assert driver.run.counters["untrained_sessions"] == 1
        await driver.plane.close()

    asyncio.run(scenario())


def test_a_reward_that_comes_after_the_lag_bound_is_kept_and_does_not_train(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario() -> None:
        driver = await begun(
            tmp_path, model_dir, renderer, groups_per_batch=1, on_max_lag="drop", lag_bound=0
        )
        late = await declare_group(driver.run, GroupBody(size=2), by_operator=False)
        for session in late:
            sample(session, renderer, [user("hi")], say(renderer, "x"), version=0)
            assert session.claim is not None
            driver.run.note_started(session.claim, 0)
        await endings.finish(driver.run, late[0], FinishBody(status="finished", reward=1.0))
        # a data plane that was told of a newer version meanwhile
        await driver.register(attempt=2, iteration=1, version=1)
        assert driver.run.state.ledger.rejected == {0: "started_over"}
        await endings.finish(driver.run, late[1], FinishBody(status="finished", reward=0.5))
        await driver.store()
        assert stored(tmp_path / "run", "opened") == {session.session_id: 1 for session in late}
        assert driver.run.counters["untrained_sessions"] == 2
        await driver.plane.close()

    asyncio.run(scenario())
