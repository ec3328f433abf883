"""What a curriculum remembers is the same after a restart, whatever happened, and without the journal."""

from __future__ import annotations

import asyncio
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.bodies import ClaimBody, FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs import claiming, endings
from sf_core.dataplane.runs.ledger import Ledger
from sf_core.dataplane.runs.results import outcome_of
from sf_core.recipes.curriculum import PastGroup, Tasks
from sf_core.recipes.outcomes import Pick, TaskRef
from storage.files import FileRef
from storage.run_directory import RunDirectory
from storage.tables.outcomes import read_outcomes
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.run_driver import OPERATIONS, Driver
from tests.bench.runs import commit
from tests.properties import examples

CURRICULA: list[dict[str, Any]] = [
    {"pool": 30, "solved": 0.0},
    {"pool": 30, "solved": 0.5, "unsolved": 0.5, "floor": 0.05, "sizes": {"fewer": 2, "above": 0.3}},
    {"pool": 30, "order": "draw", "utility": "variance"},
    {
        "pool": 30,
        "order": "draw",
        "stages": [{"shares": {"a": 1.0}, "until": 1}, {"shares": {"a": 1.0, "b": 2.0}}],
    },
    {"pool": 2, "order": "draw"},
]


class CurriculumDriver(Driver):
    """A run whose flow commits every batch that it has sealed, at once or later."""

    def __init__(self, *args: Any, **rules: Any) -> None:
        super().__init__(*args)
        self.rules = rules
        self.untold: set[int] = set()
        """Groups that were sealed without a file of outcomes, which a later curriculum forgets."""

    async def register(self, **changes: Any) -> None:
        await super().register(**{**self.rules, **changes})

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.spec["run_dir"])

    async def commit(self) -> None:
        """Commit the rollout of the last sealed batch."""
        last = self.run.state.ledger.next_batch - 1
        if last < 0 or self.directory.read_manifest(last, "rollout") is not None:
            return
        answer = dict(await self.plane.sealers["run"].seal_batch(last, self.spec["attempt"]))
        files = [FileRef(**ref) for ref in (*answer.pop("files"), *answer.pop("outcomes", ()))]
        commit(self.directory, last, "rollout", outputs=files, data=answer)

    async def seal(self) -> None:
        await self.commit()
        await super().seal()
        ledger = self.run.state.ledger
        if not self.run.spec.rollout.chooses and (batch := ledger.batches.get(ledger.next_batch - 1)):
            self.untold |= {*batch.groups, *batch.rejected}

    async def give_out_while_an_end_is_recorded(self) -> None:
        ending = [self._finish(session) for session in self.given_out]
        await asyncio.gather(*ending, self.claim(), self.claim())

    async def _finish(self, session: Any) -> None:
        sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)
        reward = float(next(self.numbers) % 3 == 0)
        await endings.finish(self.run, session, FinishBody(status="finished", reward=reward))

    async def go_back(self) -> None:
        """The flow has lost its last two iterations."""
        await self.commit()
        iteration = max(0, self.run.state.ledger.next_batch - 2)
        for lost in range(iteration, self.run.state.ledger.next_batch):
            (Path(self.spec["run_dir"]) / f"manifests/{lost:05d}/rollout.json").unlink(missing_ok=True)
        done = []
        for number in range(iteration):
            manifest = self.directory.read_manifest(number, "rollout")
            assert manifest is not None
            done += [*manifest.data["groups"], *map(int, manifest.data["rejected"])]
        at = self.spec["attempt"] + 1
        await self.register(attempt=at, iteration=iteration, version=iteration, done_groups=sorted(done))

    async def choose(self) -> None:
        """A later attempt begins to choose, and another one ends that."""
        chosen = self.spec["rollout"].get("curriculum") is not None
        # under another gate, compacted, the end of a group would be judged anew
        self.rules["curriculum"] = None if chosen else CURRICULA[0]
        await self.begin_attempt()

    def state(self) -> dict[str, Any]:
        return super().state() | {"memory": self.memory()}

    def memory(self) -> dict[str, Any]:
        manager = self.run.state.ledger
        return {
            # without a curriculum none is needed, and after a restart there is none
            "past": self.past() if manager.rules.curriculum else {},
            "positions": manager.tasks.positions,
            "in_flight": manager.tasks.in_flight,
            # the journal of an attempt that chooses nothing does not tell their versions
            "picks": {
                index: (group.pick, group.version if group.is_told else None)
                for index, group in manager.groups.items()
            },
            "ended": manager.ended,
            "next": [] if self.untold else next_picks(manager),
        }

    def past(self) -> dict[TaskRef, list[PastGroup]]:
        tasks = self.run.state.ledger.tasks.past
        told = {task: [one for one in tasks[task] if one.group not in self.untold] for task in sorted(tasks)}
        return {task: known for task, known in told.items() if known}


def next_picks(manager: Ledger) -> list[Pick]:
    """The picks of the next ten groups."""
    tasks = deepcopy(manager.tasks)
    picks = []
    for number in range(10):
        picks.append(tasks.pick(10**6 + number, manager.next_batch))
        tasks.note(picks[-1])
    return picks


MORE = ["play", "play", "play", "restart", "commit", "begin_attempt", "go_on_after_release", "go_back"]


@settings(max_examples=examples(100), deadline=None)
@given(
    curriculum=st.sampled_from(CURRICULA),
    spare_sessions=st.integers(0, 2),
    least_sessions=st.sampled_from([None, 1]),
    operations=st.lists(
        st.sampled_from([*OPERATIONS, *MORE, "give_out_while_an_end_is_recorded"]), max_size=50
    ),
)
@example(
    curriculum=CURRICULA[0],
    spare_sessions=1,
    least_sessions=None,
    operations=["claim", "give_out_while_an_end_is_recorded", "give_out_while_an_end_is_recorded", "play"],
)
@example(
    curriculum=CURRICULA[2],
    spare_sessions=0,
    least_sessions=None,
    operations=[
        *["play"] * 9,
        "seal",
        *["play"] * 9,
        "seal",
        "publish",
        *["play"] * 9,
        "seal",
        "go_back",
        "play",
    ],
)
def test_the_memory_of_a_run_opened_from_its_journal_is_that_of_the_run_that_wrote_it(
    model_dir: str,
    renderer: Renderer,
    curriculum: dict[str, Any],
    spare_sessions: int,
    least_sessions: int | None,
    operations: list[str],
) -> None:
    async def scenario(folder: Path) -> None:
        rules = {"spare_sessions": spare_sessions, "least_sessions": least_sessions}
        driver = CurriculumDriver(folder, model_dir, renderer, curriculum=curriculum, **rules)
        await driver.register()
        for operation in operations:
            await getattr(driver, operation)()
        await driver.check_restart()
        await driver.plane.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


@settings(max_examples=examples(50), deadline=None)
@given(operations=st.lists(st.sampled_from([*OPERATIONS, *MORE, "choose", "choose"]), max_size=40))
@example(operations=["claim", "finish", "choose", "claim"])
@example(operations=[*["play", "claim"] * 2, "play", "seal", "publish", "go_on_while_it_is_compacted_twice"])
def test_a_run_that_begins_to_choose_later_is_restored_too(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async def scenario(folder: Path) -> None:
        driver = CurriculumDriver(folder, model_dir, renderer, curriculum=None, gate="all")
        await driver.register()
        for operation in operations:
            await getattr(driver, operation)()
        await driver.check_restart()
        await driver.plane.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


def test_groups_of_a_lost_batch_get_tasks_of_the_curriculum_again(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    async def scenario() -> None:
        # the journal has the groups of the last batch alone, and the flow has lost two
        rules = {"pool": 40, "stages": [{"shares": {"a": 1.0}}]}
        driver = CurriculumDriver(tmp_path, model_dir, renderer, curriculum=rules, gate="all")
        await driver.register()
        while driver.run.state.ledger.next_batch < 5:
            for operation in ("play", "seal", "publish"):
                await getattr(driver, operation)()
        await driver.go_back()
        groups = driver.run.state.ledger.groups
        told = [number for number, group in groups.items() if group.is_complete]
        lost = [number for number in groups if number < min(told)]
        assert [group.num_open for group in groups.values()][:2] == [2, 2] and len(lost) == 2
        # one of its sessions was given out with the first of the next group
        assert [member.attempt for member in groups[lost[1]].members] == [-1, 0]
        tasks = [group.pick.task for group in groups.values() if group.pick]
        assert {(task.source, task.number in range(40)) for task in tasks} == {("a", True)}
        assert driver.run.state.ledger.tasks.in_flight == dict.fromkeys(tasks, 1), "no task twice"
        memory = driver.memory()
        for compacts in (False, True):
            if compacts:
                await driver.run.compact()
            await driver.restart()
            assert driver.memory() == memory
        await driver.go_back()
        assert driver.memory()["picks"].items() >= {n: memory["picks"][n] for n in lost}.items()
        await driver.plane.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_without_its_journal_a_run_goes_on_with_what_its_directory_tells(
    tmp_path: Path, model_dir: str, renderer: Renderer, curriculum: dict[str, Any]
) -> None:
    async def scenario() -> None:
        driver = CurriculumDriver(tmp_path, model_dir, renderer, curriculum=curriculum, gate="all")
        await driver.register()
        while driver.run.state.ledger.next_batch < 5:
            for operation in ("play", "seal", "publish"):
                await getattr(driver, operation)()
        await driver.commit()
        told = [outcome_of(row) for row in read_outcomes(driver.directory, before=5)]
        assert len({outcome.group for outcome in told}) == len(told) >= 5
        expected = Tasks(seed=driver.run.spec.seed)
        rules = driver.run.spec.rollout
        expected.set_rules(rules.curriculum, rules.success, rules.group_size, rules.spare_sessions)
        expected.observe(reversed(told))
        done = [outcome.group for outcome in told]
        version = driver.version
        journal = driver.run.journal.path
        await driver.plane.close()
        journal.unlink()
        driver.plane = DataPlane(DataplaneOptions(str(tmp_path / "another")))
        await driver.register(attempt=5, iteration=5, version=version, done_groups=done)
        tasks = driver.run.state.ledger.tasks
        assert (tasks.past, tasks.positions) == (expected.past, expected.positions)
        sessions, _ = await claiming.claim(driver.run, ClaimBody(runner="a5", max=1))
        assert sessions[0].claim is not None and sessions[0].claim.place.group not in done
        await driver.plane.close()

    asyncio.run(scenario())
