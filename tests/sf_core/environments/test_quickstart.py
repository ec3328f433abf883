import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from sf_core.config import EnvironmentConfig
from sf_core.environments.calculator import CALCULATOR, evaluate
from sf_core.environments.quickstart import ENVIRONMENTS, Quickstart
from sf_core.environments.registry import parts_of, tasks_of
from sf_core.testing.environments import EnvironmentTests
from sf_core.types import Task

ENVIRONMENT = Quickstart()


@pytest.fixture(scope="module")
def held_out() -> list[Task]:
    return [ENVIRONMENT.tasks("holdout", index) for index in range(1000)]


class TestContract(EnvironmentTests):
    environment = ENVIRONMENT


@pytest.mark.parametrize("name", ENVIRONMENTS)
class TestContractOfEachKind(EnvironmentTests):
    @pytest.fixture(autouse=True)
    def _of(self, name: str) -> None:
        self.tasks = ENVIRONMENTS[name].task
        self.reward = ENVIRONMENTS[name].score


def test_both_kinds_come_in_equal_parts(held_out: list[Task]) -> None:
    kinds = [task.environment for task in held_out]
    assert kinds.count("spell_backward") == kinds.count("calculator") == 500


@pytest.mark.parametrize("names", [("spell_backward", "calculator"), ("calculator",)])
def test_its_parts_deal_its_tasks(names: tuple[Any, ...]) -> None:
    environment = Quickstart(parts=names)
    config = EnvironmentConfig(settings={"parts": list(names)})
    assert (list(environment.sources), parts_of(config)) == ([*names], [*names])
    for index in range(20):
        source = names[index % len(names)]
        place = index // len(names)
        dealt = environment.tasks("train", index)
        assert dealt == environment.task("train", place, source) == tasks_of(config)("train", place, source)
        assert dealt == environment.task("train", index) == ENVIRONMENTS[source].task("train", place)


def test_a_part_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"^Quickstart has no part 'code'; its parts are calculator$"):
        Quickstart(parts=("calculator",)).task("train", 0, "code")


def test_training_and_held_out_prompts_are_disjoint(held_out: list[Task]) -> None:
    training = {ENVIRONMENT.tasks("train", index).prompt for index in range(2000)}
    assert not training & {task.prompt for task in held_out}


def test_another_process_gets_the_same_tasks() -> None:
    code = (
        "import json; from dataclasses import asdict; from sf_core.environments.quickstart import tasks;"
        "print(json.dumps([asdict(tasks(s, i)) for s in ('train', 'holdout') for i in (0, 1, 998, 999)]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8"
    ).stdout
    here = [asdict(ENVIRONMENT.tasks(split, i)) for split in ("train", "holdout") for i in (0, 1, 998, 999)]
    assert json.loads(printed) == json.loads(json.dumps(here))


def test_the_true_answer_earns_full_reward(held_out: list[Task]) -> None:
    assert all(ENVIRONMENT.reward(task, task.answer) == {"answer": 1.0} for task in held_out[:50])


def test_a_wrong_answer_earns_less(held_out: list[Task]) -> None:
    assert all(ENVIRONMENT.reward(task, task.answer + "x")["answer"] < 1.0 for task in held_out[:50])
    assert all(ENVIRONMENT.reward(task, "")["answer"] == 0.0 for task in held_out[:50])


def test_a_demonstration_calls_the_tool_and_repeats_its_result() -> None:
    task = ENVIRONMENT.tasks("train", 1)
    demonstration = ENVIRONMENT.demonstrate(1)
    call = demonstration.messages[1]["tool_calls"][0]["function"]
    assert call == {"name": "calc", "arguments": {"expression": task.metadata["expression"]}}
    assert [message["content"] for message in demonstration.messages[2:]] == [task.answer, task.answer]
    assert demonstration.tools == [CALCULATOR.schema]


@pytest.mark.parametrize(("expression", "value"), [("47*83", "3901"), ("12-59", "-47"), ("10 + 99", "109")])
def test_the_calculator_evaluates(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", ["", "1+", "2**9", "__import__('os')", "1+2+3", "9999999999*9"])
def test_the_calculator_refuses_anything_else(expression: str) -> None:
    with pytest.raises(ValueError, match="NUMBER OPERATOR NUMBER"):
        evaluate(expression)
