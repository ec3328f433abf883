"""A run reopened from its journal equals the run that wrote it, whatever happened."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.bodies import ClaimBody, FinishBody, RunSpec, SessionBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.runs import claiming, decide, endings
from sf_core.dataplane.runs.claiming import open_session
from sf_core.dataplane.runs.events import Finished, read_event
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.recovery import reopen_run
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef
from tests.properties import examples
from tests.sf_core.dataplane.sessions.test_session import sample, user
from tests.sf_core.dataplane.specs import SPEC, changed
from tests.sf_core.dataplane.stand import say

OPERATIONS = [
    *("claim", "finish", "fail", "lose", "play", "play", "seal", "seal", "publish", "evaluate"),
    *("pause", "pause_engine", "resume", "resume_engine", "go_on_while_it_is_compacted_twice"),
]


class Driver:
    """Flow and agent runner of one run, without HTTP."""

    def __init__(self, folder: Path, model_dir: str, renderer: Renderer) -> None:
        self.spec = changed(SPEC, run_dir=str(folder / "run"), model_dir=model_dir, gate="varied")
        self.folder, self.renderer = folder, renderer
        self.plane = DataPlane(DataplaneOptions(str(folder / "plane")))
        self.numbers = itertools.count()

    async def register(self, **changes: Any) -> None:
        self.spec = changed(self.spec, **changes)
        await self.plane.register(RunSpec.model_validate(self.spec))

    @property
    def runner(self) -> str:
        return f"a{self.spec['attempt']}"

    @property
    def run(self) -> ServedRun:
        return self.plane.runs["run"]

    @property
    def given_out(self) -> list[Session]:
        return [session for session in self.run.sessions.values() if session.claim is not None]

    async def restart(self) -> None:
        await self.plane.close()
        self.plane = DataPlane(DataplaneOptions(str(self.folder / "plane")))
        await self.plane.reopen()

    async def claim(self) -> None:
        await claiming.claim(self.run, ClaimBody(runner=self.runner, max=3, running=list(self.run.sessions)))

    async def lose(self) -> None:
        await claiming.claim(
            self.run, ClaimBody(runner=self.runner, max=0, running=list(self.run.sessions)[1:])
        )

    async def finish(self) -> None:
        for session in self.given_out[:1]:
            sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)
            reward = float(next(self.numbers) % 5 < 2)
            await endings.finish(self.run, session, FinishBody(status="finished", reward=reward))

    async def play(self) -> None:
        await self.claim()
        for _ in list(self.run.sessions):
            await self.finish()

    async def fail(self) -> None:
        for session in self.given_out[-1:]:
            await endings.finish(self.run, session, FinishBody(status="failed"))

    async def seal(self) -> None:
        if decide.readiness(self.run.state.ledger, self.run.state.ledger.next_batch).ready:
            await self.plane.sealers["run"].seal_batch(self.run.state.ledger.next_batch, self.spec["attempt"])

    async def publish(self) -> None:
        if self.version < self.run.state.ledger.next_batch:
            await self.plane.publish(self.run, WeightsRef(self.version + 1, "w"))

    async def evaluate(self) -> None:
        await self.run.start_evaluation(self.version, 2)

    async def pause(self) -> None:
        await self.run.pause("freeze", None)

    async def resume(self) -> None:
        await self.run.resume(None)

    async def pause_engine(self) -> None:
        engine = EngineConnection("engine", "lease", "worker", 1, 8, lambda frame: None)
        self.run.router.add(engine)
        await self.run.pause("evacuate", "engine")
        self.run.router.lose(engine)

    async def resume_engine(self) -> None:
        await self.run.resume("engine")

    async def go_on_while_it_is_compacted_twice(self) -> None:
        """The second compaction waits for the first one."""
        meanwhile = [self.finish, self.claim, self.publish, self.pause, self.revoke]
        compactions = [self.run.compact() for _ in range(2)]
        await asyncio.gather(*compactions, *(operation() for operation in meanwhile))

    async def revoke(self) -> None:
        await self.plane.revoke(self.run, f"lease {next(self.numbers)}")

    async def begin_attempt(self) -> None:
        await self.register(attempt=self.spec["attempt"] + 1, iteration=self.run.state.ledger.next_batch)

    async def go_on_after_release(self) -> None:
        await self.plane.release(self.run)
        await self.begin_attempt()

    async def begin_anew(self) -> None:
        at, progress = self.spec["attempt"] + 1, {"iteration": 0, "version": 0, "done_groups": []}
        await self.register(attempt=at, origin=f"made by {at}", **progress)

    @property
    def version(self) -> int:
        return self.run.router.weights.version

    def state(self) -> dict[str, Any]:
        return surviving(self.run)

    async def check_snapshot(self) -> None:
        """A restart after a compaction finds the same: replay(snapshot(state)) == state."""
        run = self.run
        await run.journal.flush()
        written = [event async for event in run.journal.replay(read_event)]
        head, keep = run.state.snapshot()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            journal = Journal(Path(folder) / "run.journal")
            for event in (*head, *filter(keep, written)):
                journal.note(event)
            await journal.flush()
            again = await reopen_run(journal, 10.0, Memory())
            assert again is not None
            await journal.close()
        assert surviving(again) == surviving(run)


def surviving(run: ServedRun) -> dict[str, Any]:
    """All that a restart has to find of a run."""
    state, ledger = run.state, run.state.ledger
    last, newest = ledger.next_batch - 1, max(ledger.evaluations, default=0)
    ended = [*ledger.ended_by.get(last, ()), *ledger.ended]
    results = {place: result.reward for place, result in state.results.by_place.items()}
    return {
        "weights": (state.weights, run.router.weights, ledger.version),
        "groups": {index: members(group) for index, group in ledger.groups.items()},
        "evaluation": [(v, members(group)) for v, group in ledger.evaluations.items() if v == newest],
        "rejected": ledger.rejected,
        "done": ledger.list_done_before(ledger.next_batch),
        # the journal of an attempt that chooses nothing does not tell the versions of groups
        "ended": [one._replace(version=0) for one in ended if one.results and one.pick],
        "next_batch": ledger.next_batch,
        "last_batch": (ledger.batches.get(last), state.answers.get(last)),
        "sessions": {name: facts(session) for name, session in sorted(run.sessions.items())},
        "results": {at: results[at] for at in results if at.split == "train" or at.group == newest},
        "opened": {name: result.reward for name, result in state.results.opened.items()},
        "released": state.released,
        "paused": (state.paused, run.router.paused),
        "revoked": state.revoked_leases,
    }


def facts(session: Session) -> tuple[Any, ...]:
    given = session.claim, session.group, session.task_id, session.environment, session.metadata
    return *given, session.answer, session.output, session.earned, session.waits_for_group


def members(group: Group) -> list[Any]:
    return [(m.progress, m.attempt, m.num_failures, m.result, m.min_version) for m in group.members]


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
        before = driver.state()
        await driver.check_snapshot()
        await driver.restart()
        assert driver.state() == before
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
        outside = await open_session(earlier, SessionBody(run_id="run"))
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
