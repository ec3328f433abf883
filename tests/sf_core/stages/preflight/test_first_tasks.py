"""What is told of an environment before a run begins; what is refused is in tests/flows/test_held_out.py."""

from __future__ import annotations

import pytest

from sf_core.config import RunConfig
from sf_core.config.yaml_file import builtin_configs, load_config
from sf_core.stages.preflight.first_tasks import predict_warnings
from sf_core.types import Task


def leaking(split: str, index: int) -> Task:
    return Task(f"add-{split}-{index}", "addition", f"{index % 50}+1?", answer=str(index % 50 + 1))


def apart(split: str, index: int) -> Task:
    prompt = ("compute", "reckon", "work out")[index % 3]
    return Task(f"add-{split}-{index}", "addition", prompt, metadata={"a": index % 50, "split": split})


def test_held_out_tasks_that_are_trained_on_are_told_before_the_run() -> None:
    def told(tasks: str, num_tasks: int = 40) -> list[str]:
        sections = {"environment": {"tasks": f"{__name__}:{tasks}"}, "evaluate": {"num_tasks": num_tasks}}
        return predict_warnings(RunConfig.model_validate(sections))

    [sentence] = told("leaking")
    assert sentence.startswith(
        "40 of the first 40 held-out tasks are also training tasks, for example add-holdout-0"
    )
    assert "leaking (tests/sf_core/stages/preflight/test_first_tasks.py:" in sentence
    # equal prompts are not equal tasks
    assert told("apart") == []


@pytest.mark.parametrize("name", builtin_configs())
def test_configurations_that_are_shipped_keep_their_splits_apart(name: str) -> None:
    assert predict_warnings(load_config(name)) == []
