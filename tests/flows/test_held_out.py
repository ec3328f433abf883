"""Flows refuse an environment with too few held-out tasks before they start anything."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flows.evaluate import evaluate
from flows.train import train
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.process.user_code import place_of
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import SPLITS, Facts
from sf_core.types import Task
from storage.run_directory import RunDirectory
from tests.bench.runs import commit, configure

REFUSAL = (
    'evaluate.num_tasks 2050: quickstart.tasks("holdout", 2049) raised ValueError: '
    "held-out index 1024: calculator has 1024 held-out tasks"
)

asked: list[tuple[str, int]] = []
numbers = count()


def three_tasks(split: str, index: int) -> Task:
    asked.append((split, index))
    return Task(["a", "b", "c"][index], "letters", "say it")


def changing_tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "numbers", str(next(numbers)))


def facts(split: str, index: int) -> Any:
    return {"task_id": "a"}


def configured(folder: Path, num_tasks: int) -> RunConfig:
    return validate_config(
        {"run_id": "r", "storage": {"root": str(folder)}, "evaluate": {"num_tasks": num_tasks}}
    )


def test_training_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        train.fn(configured(tmp_path, 2050))
    assert str(refused.value) == REFUSAL
    assert not (tmp_path / "r").exists()


def test_no_version_is_measured_on_more_than_there_are(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    configure(run)
    commit(run, None, "start")
    with pytest.raises(ValueError) as refused:
        evaluate.fn(configured(tmp_path, 2050))
    assert str(refused.value) == REFUSAL
    assert run.begin_attempt() == 1


def drawing(tasks: str, num_tasks: int) -> RunConfig:
    environment = {"tasks": f"{__name__}:{tasks}"}
    return validate_config({"environment": environment, "evaluate": {"num_tasks": num_tasks}})


def test_few_tasks_are_asked_for_and_the_line_that_has_none_is_named() -> None:
    asked.clear()
    preflight(Facts(drawing("three_tasks", 3), splits=SPLITS))
    with pytest.raises(
        ValueError, match=r"raised IndexError: list index out of range, .*test_held_out.py:\d+$"
    ):
        preflight(Facts(drawing("three_tasks", 4), splits=SPLITS))
    assert asked == [("holdout", 2)] * 2 + [("train", 0)] * 2 + [("train", 1)] * 2 + [("holdout", 3)]


def test_an_evaluation_asks_for_no_training_task() -> None:
    asked.clear()
    preflight(Facts(drawing("three_tasks", 3), splits=["holdout"]))
    assert asked == [("holdout", 2)] * 2


def test_tasks_that_change_are_refused_with_the_function_and_what_differs() -> None:
    with pytest.raises(ValueError) as refused:
        preflight(Facts(drawing("changing_tasks", 3), splits=SPLITS))
    told = re.sub(r"'\d+'", "'N'", str(refused.value))
    changing = f"{__name__}:changing_tasks ({place_of(changing_tasks)})"
    assert told == (
        f'environment.tasks: {changing} gave different tasks in two calls with ("holdout", 2): prompt was '
        "'N' and then 'N'. Equal arguments must give equal tasks, in every process"
    )


def test_what_is_no_task_is_told_as_that() -> None:
    with pytest.raises(ValueError) as refused:
        preflight(Facts(drawing("facts", 1), splits=SPLITS))
    assert str(refused.value) == (
        f'environment.tasks: {__name__}:facts ({place_of(facts)}) called with ("holdout", 0) returned '
        "{'task_id': 'a'}, which is not a task: the function must return "
        "sf_core.types.Task(task_id, environment, prompt)"
    )


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ("quickstart", "its parts are spell_backward, calculator"),
        ("instructions", "it has no parts"),
    ],
)
def test_a_stage_of_a_source_that_the_environment_lacks_is_refused(
    tmp_path: Path, environment: str, told: str
) -> None:
    stages = [{"shares": {"code": 1, "mathematics": 2}, "until": 2}, {"shares": {"code": 1}}]
    given = configured(tmp_path, 4).model_dump(mode="json")
    given["environment"]["name"] = environment
    given["rollout"]["curriculum"] = {"stages": stages}
    with pytest.raises(ValueError) as refused:
        train.fn(validate_config(given))
    assert str(refused.value) == (f"rollout.curriculum.stages: {environment} lacks code, mathematics; {told}")
    assert not (tmp_path / "r").exists()


def test_a_stage_of_the_parts_that_there_are_is_taken() -> None:
    stages = [{"shares": {"calculator": 1}, "until": 2}, {"shares": {"calculator": 1, "spell_backward": 2}}]
    preflight(Facts(validate_config({"rollout": {"curriculum": {"stages": stages}}}), splits=SPLITS))
