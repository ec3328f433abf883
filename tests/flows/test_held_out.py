"""Flows refuse an environment with too few held-out tasks before they start anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.evaluate import evaluate
from flows.train import train
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.stages.run import check_held_out
from storage.run_directory import RunDirectory
from tests.sf_core.runs import commit, configure

REFUSAL = (
    'evaluate.num_tasks 2050: quickstart.tasks("holdout", 2049) raises ValueError: '
    "held-out index 1024: calculator has 1024 held-out tasks"
)

asked: list[tuple[str, int]] = []


def three_tasks(split: str, index: int) -> str:
    asked.append((split, index))
    return ["a", "b", "c"][index]


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


def test_an_environment_is_asked_once_for_the_last_task() -> None:
    asked.clear()
    environment = {"tasks": f"{__name__}:three_tasks"}
    three, four = (
        validate_config({"environment": environment, "evaluate": {"num_tasks": num_tasks}})
        for num_tasks in (3, 4)
    )
    check_held_out(three)
    with pytest.raises(ValueError, match=r"raises IndexError: list index out of range$"):
        check_held_out(four)
    assert asked == [("holdout", 2), ("holdout", 3)]
