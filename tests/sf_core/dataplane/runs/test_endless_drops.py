"""A run of which nothing counts any more has to end: when it drops groups, and reopened from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sf_core.dataplane.control.status import batch_status
from sf_core.dataplane.runs import endings
from tests.bench.dataplane.run_driver import Driver

SAME = (1.0, 1.0)

RULES: dict[str, Any] = {"groups_per_batch": 2, "session_attempts": 1, "gate": "varied"}

FAULT = (
    "the last 20 groups were all dropped (equal_rewards 20), so no batch can be completed: rollout.gate "
    "varied "
    "rejects every group; use tasks that the policy sometimes solves, correct rollout.success, or set "
    "rollout.gate to all"
)


async def drop(driver: Driver, number: int, rewards: Sequence[float | None] = SAME) -> None:
    """Begin so many groups and end them with these rewards."""
    for _ in range(number):
        await driver.end_group(rewards)


def fault(driver: Driver) -> str:
    return str(batch_status(driver.run, driver.ledger.next_batch)["fault"])


async def test_it_ends_with_a_sentence_until_another_attempt(driver: Driver) -> None:
    await driver.register(**RULES)
    await drop(driver, 19)
    assert fault(driver) == ""
    await driver.check_restart()
    await driver.end_group(SAME)
    assert fault(driver) == FAULT
    assert driver.ledger.groups == {} and driver.run.sessions == {}
    assert driver.run.counters["rejected_groups.all_dropped"] > 0, "what was in flight"
    await driver.claim()
    assert driver.run.sessions == {}
    await driver.check_restart()
    assert fault(driver) == FAULT
    await driver.claim()
    assert driver.run.sessions == {}

    await driver.begin_attempt()
    assert (fault(driver), driver.ledger.dropped_in_a_row) == ("", {})
    await drop(driver, 19)
    assert fault(driver) == ""
    await drop(driver, 2, (0.0, 1.0))
    await driver.seal()
    assert driver.ledger.next_batch == 1


async def test_killed_before_the_rejections_of_its_end_were_written_it_ends_all_the_same(
    driver: Driver,
) -> None:
    await driver.register(**RULES)
    await drop(driver, 19)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endings, "refuse_endless_drops", lambda run: None)
        await driver.end_group(SAME)
    assert fault(driver) == ""
    await driver.restart()
    assert fault(driver) == FAULT
    await driver.begin_attempt()
    await driver.claim()
    assert driver.run.sessions, "the groups in flight go on"


async def test_a_group_that_counts_begins_the_count_anew(driver: Driver) -> None:
    await driver.register(**RULES)
    await drop(driver, 19)
    await driver.end_group((0.0, 1.0))
    await drop(driver, 19)
    assert fault(driver) == ""
    assert sum(driver.ledger.dropped_in_a_row.values()) == 19
    await driver.restart()
    assert sum(driver.ledger.dropped_in_a_row.values()) == 19
    await driver.end_group(SAME)
    assert fault(driver) == FAULT
    assert [group.is_complete for group in driver.ledger.groups.values()] == [True], "it still counts"


async def test_counts_are_by_reason_and_what_fails_most_is_named(driver: Driver) -> None:
    await driver.register(**RULES)
    await drop(driver, 3)
    await drop(driver, 17, [None])
    assert fault(driver) == (
        "the last 20 groups were all dropped (equal_rewards 3, agent_error 17), so no batch can be "
        "completed: fix the failure; the last error was KeyError: x"
    )


async def test_groups_that_their_judge_drops_name_the_judge(driver: Driver) -> None:
    await driver.register(**RULES)
    for _ in range(20):
        await driver.claim()
        await driver.report(driver.given_out[0], status="failed", cause="group", error="no majority")
    assert fault(driver) == (
        "the last 20 groups were all dropped (not_judged 20), so no batch can be completed: "
        "environment.group_reward returns None for these groups; use larger groups, or other tasks"
    )
