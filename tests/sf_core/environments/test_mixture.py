"""Environments joined to one: each task is worked on and scored by the part that it is of."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.agents.judges.judges import takes_judges
from sf_core.config import EnvironmentConfig, RunConfig
from sf_core.config.validation import validate_config
from sf_core.environments.environment import Demonstration, Environment
from sf_core.environments.mixture import Mixture
from sf_core.environments.registry import (
    agent_of,
    check_host,
    environment_of,
    parts_of,
    prepare_of,
    reward_of,
    tasks_of,
)
from sf_core.environments.splits import Split
from sf_core.process.user_code import place_of
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import SPLITS, Facts
from sf_core.testing.environments import EnvironmentTests
from sf_core.types import Endpoint, Task

ENDPOINT = Endpoint("http://nowhere/v1", "key", "policy")
WORDS: dict[str, Any] = {"name": "quickstart", "settings": {"parts": ["spell_backward"]}}
SUMS: dict[str, Any] = {"name": "quickstart", "settings": {"parts": ["calculator"]}}
RULES: dict[str, Any] = {"name": "instructions", "settings": {"answers": 2}}


class Rooms(Environment):
    """An agent that needs something prepared, and a plain reward."""

    doors: int = 1

    def tasks(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", "rooms", f"{split} {index} of {self.doors}", str(self.doors))

    @asynccontextmanager
    async def prepare(self, task: Task) -> AsyncIterator[str]:
        yield f"key of {task.task_id} of {task.environment}"

    def agent(self, task: Task, endpoint: Endpoint, key: str) -> dict[str, Any]:
        return {"key": key, "thread": threading.current_thread() is not threading.main_thread()}

    def reward(self, task: Task, answer: dict[str, Any]) -> dict[str, float]:
        return {"doors": float(self.doors), "open": float(answer["key"] == f"key of {task.task_id} of rooms")}

    def files(self, task: Task) -> dict[str, bytes]:
        return {"door": task.environment.encode()}

    def demonstrate(self, index: int) -> Demonstration:
        return Demonstration([{"role": "user", "content": f"{self.doors}, {index}"}])


class Away(Rooms):
    def why_not_here(self) -> str:
        return "no key is cut"


def my_tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "mine", f"{split} {index}", "yes")


async def my_agent(task: Task, endpoint: Endpoint) -> str:
    return f"{task.environment} {endpoint.model}"


def my_reward(task: Task, answer: str) -> float:
    return float(task.environment == "mine")


def no_reward(task: Task, answer: str) -> None:
    pass


def ours(kind: type, **settings: Any) -> dict[str, Any]:
    return {"name": f"{__name__}:{kind.__name__}", "settings": settings}


OWN = {name: f"{__name__}:my_{name}" for name in ("tasks", "agent", "reward")}


def mixing(**parts: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name="mixture", settings={"parts": parts})


async def worked_on(config: EnvironmentConfig, task: Task) -> Any:
    """What the agent answers, called as a runner calls it."""
    agent = agent_of(config)
    prepare = prepare_of(config)
    if prepare is None:
        return await agent(task, ENDPOINT)
    async with prepare(task) as prepared:
        return await agent(task, ENDPOINT, prepared)


async def scored(config: EnvironmentConfig, task: Task, answer: Any) -> Any:
    return await reward_of(config)(task, answer)


class TestContract(EnvironmentTests):
    environment = environment_of(mixing(words=WORDS, rules=RULES, sums=SUMS))


class TestContractOfTwoAlike(EnvironmentTests):
    environment = environment_of(mixing(easy=RULES, hard={"name": "instructions"}))


def test_parts_take_turns_in_both_splits() -> None:
    tasks = tasks_of(mixing(words=WORDS, own=OWN, rules=RULES))
    for split in ("train", "holdout"):
        drawn = [tasks(split, index) for index in range(9)]
        assert [task.environment for task in drawn] == ["words", "own", "rules"] * 3
        assert [task.task_id for task in drawn[1::3]] == [f"own/{split}-{index}" for index in range(3)]


@given(st.sampled_from(["words", "rules"]), st.sampled_from(["train", "holdout"]), st.integers(0, 500))
def test_a_source_gives_the_tasks_of_its_part(source: str, split: Split, index: int) -> None:
    parts = {"words": WORDS, "rules": RULES}
    task = tasks_of(mixing(**parts))(split, index, source)
    own = tasks_of(EnvironmentConfig(**parts[source]))(split, index)
    assert (task.task_id, task.environment) == (f"{source}/{own.task_id}", source)
    assert (task.prompt, task.answer, task.metadata) == (own.prompt, own.answer, own.metadata)


def test_a_part_of_a_part_is_not_seen() -> None:
    config = mixing(both={"name": "quickstart"}, rules=RULES)
    assert parts_of(config) == ["both", "rules"]
    with pytest.raises(ValueError, match=r"^Mixture has no part 'calculator'; its parts are both, rules$"):
        tasks_of(config)("train", 0, "calculator")


async def test_each_part_has_its_own_agent_and_reward() -> None:
    config = mixing(one=ours(Rooms), own=OWN, three=ours(Rooms, doors=3))
    tasks = tasks_of(config)
    for source, doors in (("one", 1.0), ("three", 3.0)):
        task = tasks("train", 5, source)
        answer = await worked_on(config, task)
        assert answer == {"key": "key of train-5 of rooms", "thread": True}
        assert await scored(config, task, answer) == {"doors": doors, "open": 1.0}
    task = tasks("holdout", 1)
    assert (task.environment, await worked_on(config, task)) == ("own", "mine policy")
    assert await scored(config, task, "mine policy") == 1.0


def test_without_a_part_that_prepares_nothing_is_prepared() -> None:
    assert prepare_of(mixing(own=OWN, words=WORDS)) is None
    assert prepare_of(mixing(own=OWN, rooms=ours(Rooms))) is not None


def test_another_process_scores_the_answer_of_a_task() -> None:
    config = mixing(one=ours(Rooms), three=ours(Rooms, doors=3))
    code = (
        "import asyncio, json, sys; from sf_core.config import EnvironmentConfig;"
        "from sf_core.environments.registry import reward_of, tasks_of;"
        "config = EnvironmentConfig.model_validate_json(sys.argv[1]); tasks = tasks_of(config);"
        "claims = [('train', 7, 'three'), ('train', 7, 'one'), ('holdout', 3)];"
        "reward = lambda task: asyncio.run(reward_of(config)(task, {'key': 'none'}));"
        "print(json.dumps([[tasks(*claim).task_id, reward(tasks(*claim))['doors']] for claim in claims]))"
    )
    words = [sys.executable, "-c", code, config.model_dump_json()]
    printed = subprocess.run(words, capture_output=True, check=True, encoding="utf-8").stdout
    assert json.loads(printed) == [["three/train-7", 3.0], ["one/train-7", 1.0], ["three/holdout-1", 3.0]]


def test_a_reward_of_the_users_scores_the_tasks_of_all_parts() -> None:
    config = mixing(words=WORDS, rules=RULES).model_copy(update={"reward": f"{__name__}:my_reward"})
    assert reward_of(config) is my_reward
    assert agent_of(config) == environment_of(config).agent


async def asks_judges(task: Task, answer: Any, judges: Mapping[str, float]) -> float:
    return judges["quality"]


async def test_parts_that_ask_judges_are_given_those_of_the_run() -> None:
    config = mixing(words=WORDS, own={**OWN, "reward": f"{__name__}:asks_judges"})
    reward = reward_of(config)

    async def score(source: str, answer: str) -> Any:
        task = tasks_of(config)("train", 0, source)
        return await reward(task, answer, judges={"quality": 0.25})

    assert takes_judges(reward) and await score("own", "") == 0.25
    right = tasks_of(config)("train", 0, "words").answer
    assert await score("words", right) == await scored(config, tasks_of(config)("train", 0, "words"), right)


async def test_a_reward_that_is_no_number_is_told_with_the_function_of_the_part() -> None:
    config = mixing(words=WORDS, own={**OWN, "reward": f"{__name__}:no_reward"})
    with pytest.raises(ValueError) as refused:
        await scored(config, tasks_of(config)("train", 1), "yes")
    assert str(refused.value) == (
        f"the reward function {__name__}:no_reward ({place_of(no_reward)}) returned None, which is not a "
        f"finite number"
    )


async def test_a_command_finds_the_files_of_the_part() -> None:
    command = {"command": [sys.executable, "-c", "print(open('door').read(), end='')"]}
    within = mixing(flat={**ours(Rooms), "agent": command}, own=OWN)
    over = mixing(flat=ours(Rooms), own=OWN).model_copy(
        update={"agent": RunConfig.model_validate({"environment": {"agent": command}}).environment.agent}
    )
    task = tasks_of(within)("train", 0, "flat")
    assert (await worked_on(within, task)).answer == "rooms"
    assert (await worked_on(over, tasks_of(over)("train", 0, "flat"))).answer == "rooms"
    assert environment_of(over).files(tasks_of(over)("train", 0, "own")) == {}


def test_parts_are_demonstrated_in_turn() -> None:
    mixed = environment_of(mixing(two=ours(Rooms, doors=2), own=OWN, words=WORDS))
    assert mixed.has_demonstrations
    assert mixed.demonstrate(3) == Rooms(doors=2).demonstrate(1)
    assert mixed.demonstrate(1) is None
    shown = mixed.demonstrate(5)
    assert shown is not None and shown.messages[0]["content"] == mixed.tasks("train", 5).prompt
    assert mixed.classes == [Mixture, Rooms, type(environment_of(EnvironmentConfig()))]


def test_parts_without_demonstrations_cannot_warm_start_a_policy() -> None:
    config = mixing(rules=RULES, own=OWN)
    assert not environment_of(config).has_demonstrations
    with pytest.raises(
        ValueError, match=r"^policy\.warmstart: the environment mixture has no demonstrations"
    ):
        preflight(Facts(RunConfig(environment=config)))


def test_a_host_must_do_what_every_part_needs() -> None:
    check_host(mixing(words=WORDS, rooms=ours(Rooms)))
    with pytest.raises(ValueError, match=r"^environment\.name: mixture: part away: name: .*: no key is cut$"):
        check_host(mixing(words=WORDS, away=ours(Away)))
    command = mixing(words=WORDS, away={"agent": {"command": ["no-such-program"]}})
    with pytest.raises(ValueError) as refused:
        check_host(command)
    assert str(refused.value) == (
        "environment.name: mixture: part away: agent: the program 'no-such-program' "
        "does not exist on this host, or cannot be executed"
    )


async def test_a_task_of_no_part_is_refused() -> None:
    config = mixing(words=WORDS, rules=RULES).model_copy(update={"tasks": f"{__name__}:my_tasks"})
    assert parts_of(config) == []
    with pytest.raises(ValueError, match=r"^task train-0 belongs to none of the parts words, rules$"):
        await scored(config, tasks_of(config)("train", 0), "yes")


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({}, "environment.settings.parts: expected at least 1 item, got {}"),
        ({"": {}}, "environment.settings.parts: a part of a mixture needs a name"),
        (
            {"words": "quickstart"},
            "environment.settings.parts.words: expected a mapping of its settings, got 'quickst",
        ),
        (
            {"words": WORDS, "rules": {"name": "quickstat"}},
            "environment.settings.parts.rules: name: unknown environment 'quickstat'; use one of quicksta",
        ),
        (
            {"rules": {"name": "instructions", "settings": {"kinds": [], "texd": 1}}},
            "environment.settings.parts.rules: settings.kinds: expected at least 1 item, got []; "
            "settings.texd: unknown key; allowed here: kinds, ",
        ),
        (
            {"rules": {"nam": "instructions"}},
            "environment.settings.parts.rules.nam: unknown key; allowed here: name, settings, tasks, agent, ",
        ),
        (
            {"rules": {"reward": "no_such_module:reward"}},
            "environment.settings.parts.rules: reward: no_such_module:reward: cannot import no_such_module",
        ),
        (
            {"rules": {"agent": f"{__name__}:my_tasks", "prepare": f"{__name__}:my_tasks"}},
            "environment.settings.parts.rules: prepare: ",
        ),
        (
            {"all": {"name": "mixture", "settings": {"parts": {"words": WORDS}}}},
            "environment.settings.parts.all: a mixture cannot contain another mixture: list all parts",
        ),
        (
            {"words": WORDS | {"group_reward": "sf_core.recipes.outcomes:any"}},
            "environment.settings.parts.words: group_reward: a part cannot have its own group_reward; set ",
        ),
    ],
)
def test_wrong_parts_are_named(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        environment_of(mixing(**parts))
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)


def test_stages_share_out_the_parts_and_no_others() -> None:
    def config(**shares: float) -> RunConfig:
        environment = mixing(words=WORDS, own=OWN).model_dump(mode="json")
        rollout = {"curriculum": {"stages": [{"shares": shares}]}}
        return validate_config({"environment": environment, "rollout": rollout})

    preflight(Facts(config(words=1, own=2), splits=SPLITS))
    with pytest.raises(ValueError) as refused:
        preflight(Facts(config(calculator=1), splits=SPLITS))
    assert str(refused.value) == (
        "rollout.curriculum.stages: mixture lacks calculator; its parts are words, own"
    )
