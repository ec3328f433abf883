"""A run of which nothing counts any more has to end: when it drops groups, and reopened from its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sf_core.dataplane.bodies import FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.status import batch_status
from sf_core.dataplane.runs import endings
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.run_driver import Driver

Rewards = tuple[float, ...] | None
"""Of the sessions of a group; None: the first one fails for good."""

SAME: Rewards = (1.0, 1.0)


class Dropping(Driver):
    async def group(self, rewards: Rewards) -> None:
        """Begin a group and end it so."""
        await self.claim()
        sessions = self.given_out[:2]
        if rewards is None:
            await endings.finish(self.run, sessions[0], FinishBody(status="failed", error="KeyError: x"))
            return
        for session, reward in zip(sessions, rewards, strict=True):
            sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)
            await endings.finish(self.run, session, FinishBody(status="finished", reward=reward))

    async def groups(self, number: int, rewards: Rewards = SAME) -> None:
        for _ in range(number):
            await self.group(rewards)

    def fault(self) -> str:
        return str(batch_status(self.run, self.run.state.ledger.next_batch)["fault"])


RULES: dict[str, Any] = {"groups_per_batch": 2, "session_attempts": 1, "gate": "varied"}

FAULT = (
    "the last 20 groups were all dropped (equal_rewards 20), so no batch can be completed: rollout.gate "
    "varied "
    "rejects every group; use tasks that the policy sometimes solves, correct rollout.success, or set "
    "rollout.gate to all"
)


Scenario = Callable[[Dropping], Awaitable[None]]
Play = Callable[[Scenario], None]


@pytest.fixture
def dropping(tmp_path: Path, model_dir: str, renderer: Renderer) -> Play:
    def play(scenario: Scenario) -> None:
        async def played() -> None:
            driver = Dropping(tmp_path, model_dir, renderer)
            await driver.register(**RULES)
            await scenario(driver)
            await driver.plane.close()

        asyncio.run(played())

    return play


@pytest.mark.parametrize("compacted", [False, True])
def test_reopened_it_ends_with_the_same_sentence_until_another_attempt(
    dropping: Play, compacted: bool
) -> None:
    async def scenario(driver: Dropping) -> None:
        await driver.groups(19)
        assert driver.fault() == ""
        await driver.restart()
        assert driver.fault() == ""
        await driver.group(SAME)
        assert driver.fault() == FAULT
        assert driver.run.state.ledger.groups == {} and driver.run.sessions == {}
        assert driver.run.counters["rejected_groups.all_dropped"] > 0, "what was in flight"
        await driver.claim()
        assert driver.run.sessions == {}
        if compacted:
            await driver.run.compact()
        await driver.restart()
        assert driver.fault() == FAULT
        await driver.claim()
        assert driver.run.sessions == {}

        await driver.begin_attempt()
        assert (driver.fault(), driver.run.state.ledger.dropped_in_a_row) == ("", {})
        await driver.groups(19)
        assert driver.fault() == ""
        await driver.restart()
        assert driver.fault() == ""
        await driver.groups(2, (0.0, 1.0))
        await driver.seal()
        assert driver.run.state.ledger.next_batch == 1

    dropping(scenario)


def test_killed_before_the_rejections_of_its_end_were_written_it_ends_all_the_same(dropping: Play) -> None:
    async def scenario(driver: Dropping) -> None:
        await driver.groups(19)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(endings, "refuse_endless_drops", lambda run: None)
            await driver.group(SAME)
        assert driver.fault() == ""
        await driver.restart()
        assert driver.fault() == FAULT
        await driver.begin_attempt()
        await driver.claim()
        assert driver.run.sessions, "the groups in flight go on"

    dropping(scenario)


def test_a_group_that_counts_begins_the_count_anew(dropping: Play) -> None:
    async def scenario(driver: Dropping) -> None:
        await driver.groups(19)
        await driver.group((0.0, 1.0))
        await driver.groups(19)
        assert driver.fault() == ""
        assert sum(driver.run.state.ledger.dropped_in_a_row.values()) == 19
        await driver.restart()
        assert sum(driver.run.state.ledger.dropped_in_a_row.values()) == 19
        await driver.group(SAME)
        assert driver.fault() == FAULT
        assert [group.is_complete for group in driver.run.state.ledger.groups.values()] == [True], (
            "it still counts"
        )

    dropping(scenario)


def test_counts_are_by_reason_and_what_fails_most_is_named(dropping: Play) -> None:
    async def scenario(driver: Dropping) -> None:
        await driver.groups(3)
        await driver.groups(17, None)
        assert driver.fault() == (
            "the last 20 groups were all dropped (equal_rewards 3, agent_error 17), so no batch can be "
            "completed: fix the failure; the last error was KeyError: x"
        )

    dropping(scenario)


def test_groups_that_their_judge_drops_name_the_judge(dropping: Play) -> None:
    async def scenario(driver: Dropping) -> None:
        for _ in range(20):
            await driver.claim()
            told = FinishBody(status="failed", cause="group", error="no majority")
            await endings.finish(driver.run, driver.given_out[0], told)
        assert driver.fault() == (
            "the last 20 groups were all dropped (not_judged 20), so no batch can be completed: "
            "environment.group_reward returns None for these groups; use larger groups, or other tasks"
        )

    dropping(scenario)
