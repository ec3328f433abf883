from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.repair.environment import Repair
from sf_core.config import PolicyConfig
from sf_core.config.yaml_file import load_config
from sf_core.dataplane.chat.renderer import Renderer, open_renderer
from sf_core.environments.functions.judge import HiddenTests
from sf_core.environments.registry import environment_of
from sf_core.models.builtin import make_policy, make_tokenizer
from sf_core.testing.environments import EnvironmentTests
from sf_core.training.demonstrations import encode
from sf_core.types import Task
from tests.bench import runners
from tests.bench.command_agents import rows_of
from tests.bench.dataplane import planes

ROOT = Path(__file__).parents[3]
REPAIR = Repair(operators=1)


class TestContract(EnvironmentTests):
    environment = Repair(tests=3)
    num_scored = 1


async def reward(task: Task, source: str, environment: Repair = REPAIR) -> float:
    return await environment.reward(task, source)


def solution_of(task: Task) -> str:
    return HiddenTests.from_text(task.answer).solution


async def test_the_solution_earns_everything_and_the_fault_nothing() -> None:
    for operators in (1, 4):
        environment = Repair(operators=operators, reward_for="share")
        for index in range(3):
            task = environment.tasks("train", index)
            assert await reward(task, solution_of(task), environment) == 1.0
            assert await reward(task, task.prompt.partition("assert")[0], environment) == 0.0


async def test_what_passes_the_visible_check_alone_earns_nothing() -> None:
    for index in range(3):
        task = REPAIR.tasks("train", index)
        check = task.prompt.splitlines()[-1]
        special = f"def f(x,y): return {task.metadata['expected']}"
        found: dict[str, object] = {}
        exec(f"{special}\n{check}", found)
        assert await reward(task, special) == 0.0


def test_the_visible_check_is_none_of_the_hidden_ones() -> None:
    for index in range(50):
        task = REPAIR.tasks("holdout", index)
        assert task.metadata["call"] not in HiddenTests.from_text(task.answer).calls


@pytest.mark.parametrize("operators", range(1, 5))
def test_there_are_tasks_of_every_size(operators: int) -> None:
    tasks = [Repair(operators=operators, tests=20).tasks("train", index) for index in range(200)]
    assert {sum(map(task.metadata["wrong"].count, "+-*")) for task in tasks} == {operators}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_session_edits_checks_and_is_scored_for_what_it_leaves(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
) -> None:
    task = REPAIR.tasks("train", 0)
    right = solution_of(task).rpartition("return ")[2].strip()
    x, y = task.metadata["call"]
    answers = [
        call("check"),
        call("edit", expression="x//("),
        call("check"),
        call("edit", expression="[x, y]"),
        call("check"),
        call("edit", expression=right),
        call("check"),
        "It is right now.",
    ]
    plane_process.register(group_size=1, groups_per_batch=1, num_batches=1)
    plane_process.connect(planes.answering(renderer, *answers))
    functions = {"prepare": REPAIR.prepare, "agent": REPAIR.agent, "reward": REPAIR.reward}
    runner = runners.make_runner(plane_process.url, tasks=REPAIR.tasks, **functions)
    runners.run_until_ready(plane_process, runner)
    [row] = rows_of(plane_process)
    said = [message["content"] for message in json.loads(row.messages) if message["role"] == "tool"]
    before: dict[str, Callable[[int, int], int]] = {}
    exec(task.prompt.partition("assert")[0], before)
    assert said == [str(before["f"](x, y)), "", "error", "", f"[{x}, {y}]", "", "ok"]
    assert row.reward == 1.0


def test_demonstrations_use_the_tools_rightly_and_do_not_know_what_is_wrong() -> None:
    passed = []
    for index in range(200):
        task = REPAIR.tasks("train", index)
        shown = REPAIR.demonstrate(index)
        assert shown.messages[0] == {"role": "user", "content": task.prompt}
        assert [tool["function"]["name"] for tool in shown.tools or []] == ["edit", "check"]
        turns = [message for message in shown.messages if message["role"] == "assistant"]
        assert len(turns) <= REPAIR.max_turns
        for edited, checked in zip(shown.messages[1:-1:4], shown.messages[4:-1:4], strict=True):
            [edit] = edited["tool_calls"]
            verdict: dict[str, Callable[[int, int], int]] = {}
            exec(f"f = lambda x, y: {edit['function']['arguments']['expression']}", verdict)
            value = verdict["f"](*task.metadata["call"])
            right = value == task.metadata["expected"]
            assert checked["content"] == ("ok" if right else str(value))
        passed.append(shown.messages[-2]["content"] == "ok")
    # half of the first edits, and some of the later ones
    assert 0.5 < sum(passed) / len(passed) < 0.9


def test_the_configuration_fits_the_task(tmp_path: Path) -> None:
    """No turn of a demonstration is longer than it allows, and no session than the context."""
    config = load_config(ROOT / "configs" / "repair.yaml")
    environment = environment_of(config.environment)
    tokenizer = make_tokenizer()
    make_policy(str(tmp_path), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    shipped = open_renderer(str(tmp_path))
    for index in range(200):
        shown = encode(shipped, environment.demonstrate(index))
        assert len(shown.token_ids) < config.engine.context // 2
        assert tokenizer.unk_token_id not in shown.token_ids
        sampled = "".join(map(str, shown.is_answer.astype(int))).split("0")
        assert max(map(len, sampled)) < config.rollout.turn_tokens
