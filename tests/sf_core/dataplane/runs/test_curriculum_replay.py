"""What a curriculum remembers is the same after a restart, whatever happened, and without the journal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs.results import outcome_of
from sf_core.recipes.curriculum import Tasks
from storage.tables.outcomes import read_outcomes
from tests.bench.dataplane import run_driver
from tests.bench.dataplane.verbs.surviving import memory
from tests.bench.properties import examples

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


MORE = [
    *(operation.replace("seal", "commit_and_seal") for operation in run_driver.OPERATIONS),
    *("play", "play", "play", "restart", "commit", "begin_attempt", "go_on_after_release", "go_back"),
]
"""A flow commits every batch that it has sealed, at once or later."""


@settings(max_examples=examples(100))
@given(
    curriculum=st.sampled_from(CURRICULA),
    spare_sessions=st.integers(0, 2),
    least_sessions=st.sampled_from([None, 1]),
    operations=st.lists(st.sampled_from([*MORE, "give_out_while_an_end_is_recorded"]), max_size=50),
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
        *([*["play"] * 9, "commit_and_seal"] * 2 + ["publish", *["play"] * 9]),
        *("commit_and_seal", "go_back", "play"),
    ],
)
async def test_the_memory_of_a_run_opened_from_its_journal_is_that_of_the_run_that_wrote_it(
    model_dir: str, renderer: Renderer, operations: list[str], **rules: Any
) -> None:
    async with run_driver.driving(model_dir, renderer) as driver:
        await driver.register(**rules)
        await driver.do(*operations)


@settings(max_examples=examples(50))
@given(operations=st.lists(st.sampled_from([*MORE, "choose", "choose"]), max_size=40))
@example(operations=["claim", "finish", "choose", "claim"])
@example(
    operations=[
        *(["play", "claim"] * 2 + ["play", "commit_and_seal", "publish"]),
        "go_on_while_it_is_compacted_twice",
    ]
)
async def test_a_run_that_begins_to_choose_later_is_restored_too(
    model_dir: str, renderer: Renderer, operations: list[str]
) -> None:
    async with run_driver.driving(model_dir, renderer) as driver:
        await driver.register(curriculum=None, gate="all")
        await driver.do(*operations)


async def test_groups_of_a_lost_batch_get_tasks_of_the_curriculum_again(driver: run_driver.Driver) -> None:
    # the journal has the groups of the last batch alone, and the flow has lost two
    rules = {"pool": 40, "stages": [{"shares": {"a": 1.0}}]}
    await driver.register(curriculum=rules, gate="all")
    await driver.iterate(5)
    await driver.go_back()
    left = list(driver.ledger.groups)
    lost = [number for number in range(min(left)) if number not in driver.spec["done_groups"]]
    assert len(lost) == 2 and not driver.ledger.groups.keys() & set(lost)
    await driver.do("claim", "claim")
    groups = driver.ledger.groups
    assert list(groups) == sorted(groups) == [lost[0], *left], "the lag bound admits no more"
    assert driver.ledger.next_group == lost[1]
    tasks = [group.pick.task for group in groups.values() if group.pick]
    assert {(task.source, task.number in range(40)) for task in tasks} == {("a", True)}
    assert driver.ledger.tasks.in_flight == dict.fromkeys(tasks, 1), "no task twice"
    before = memory(driver.ledger, set())
    await driver.restart()
    assert memory(driver.ledger, set()) == before
    await driver.run.compact()
    await driver.restart()
    assert memory(driver.ledger, set()) == before
    await driver.go_back()
    assert driver.ledger.groups[lost[0]].pick == before["picks"][lost[0]][0]
    for _ in range(8):
        await driver.claim()
        if lost[1] in driver.ledger.groups:
            break
        await driver.do("play", "commit_and_seal", "publish")
    begun = driver.ledger.groups[lost[1]].pick
    assert begun is not None and begun.task.source == "a" and begun.task not in tasks


@pytest.mark.parametrize("curriculum", CURRICULA)
async def test_without_its_journal_a_run_goes_on_with_what_its_directory_tells(
    driver: run_driver.Driver, curriculum: dict[str, Any]
) -> None:
    await driver.register(curriculum=curriculum, gate="all")
    await driver.iterate(5)
    told = [outcome_of(row) for row in read_outcomes(driver.directory, before=5)]
    assert len({outcome.group for outcome in told}) == len(told) >= 5
    expected = Tasks(seed=driver.run.spec.seed)
    rules = driver.run.spec.rollout
    expected.set_rules(rules.curriculum, rules.success, rules.group_size, rules.spare_sessions)
    expected.observe(reversed(told))
    done = [outcome.group for outcome in told]
    version = driver.version
    journal = driver.run.journal.path
    await driver.move("another")
    journal.unlink()
    await driver.register(attempt=5, iteration=5, version=version, done_groups=done)
    tasks = driver.ledger.tasks
    assert (tasks.past, tasks.positions) == (expected.past, expected.positions)
    [session] = await driver.claimed("a", 1)
    assert session.claim is not None and session.claim.slot.group not in done
