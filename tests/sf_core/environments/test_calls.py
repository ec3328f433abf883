"""Functions that cannot be called as runs call them, and tasks that are none, are refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.agents.judges.judges import takes_judges
from sf_core.config import EnvironmentConfig
from sf_core.environments.environment import NoTaskError, check_call, find_difference, require_tasks
from sf_core.environments.registry import (
    agent_of,
    group_reward_of,
    prepare_of,
    reward_of,
    tasks_of,
)
from sf_core.process.user_code import place_of
from sf_core.types import Task


def tasks_without_split(index: int) -> Task:
    return Task(str(index), "e", "p")


def agent_alone(task: Task) -> str:
    return ""


def agent(task: Task, endpoint: Any) -> str:
    return ""


def reward_of_three(task: Task, answer: str, strict: bool) -> float:
    return 0.0


def prepare_nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("name", "function", "find", "told"),
    [
        ("tasks", tasks_without_split, tasks_of, r"with \(split, index\): too many positional arguments"),
        ("agent", agent_alone, agent_of, r"with \(task, endpoint\): too many positional arguments"),
        (
            "reward",
            reward_of_three,
            reward_of,
            r"with \(task, answer\): missing a required argument: 'strict'",
        ),
        ("prepare", prepare_nothing, prepare_of, r"with \(task\): too many positional arguments"),
    ],
)
def test_a_function_with_other_arguments_is_refused_with_its_line(
    name: str, function: Callable[..., Any], find: Callable[..., Any], told: str
) -> None:
    reference = f"{__name__}:{function.__name__}"
    named = re.escape(f"environment.{name}: {reference} ({place_of(function)}) takes (")
    with pytest.raises(ValueError, match=f"^{named}.*, but is called {told}$"):
        find(EnvironmentConfig.model_validate({name: reference}))


def test_an_agent_must_take_what_is_prepared_for_it() -> None:
    config = {"agent": f"{__name__}:agent", "prepare": f"{__name__}:agent_alone"}
    with pytest.raises(ValueError, match=r"is called with \(task, endpoint, prepared\)"):
        agent_of(EnvironmentConfig.model_validate(config))


def asks_first(judges: Any, task: Task, answer: str) -> float:
    return 0.0


def asks_by_name(task: Task, answers: list[str], *, judges: Any) -> list[float]:
    return [0.0]


def test_a_reward_function_is_given_judges_by_their_name() -> None:
    config = {"reward": f"{__name__}:asks_first", "group_reward": f"{__name__}:asks_by_name"}
    with pytest.raises(ValueError, match=r"is called with \(task, answer, judges\): multiple values for"):
        reward_of(EnvironmentConfig.model_validate(config))
    group_reward = group_reward_of(EnvironmentConfig.model_validate(config))
    assert group_reward is asks_by_name and takes_judges(group_reward)
    assert not takes_judges(agent_alone) and not takes_judges(max)
    # an agent gets none
    with pytest.raises(ValueError, match=r"is called with \(task, endpoint\)"):
        agent_of(EnvironmentConfig.model_validate({"agent": f"{__name__}:asks_by_name"}))


def test_a_function_whose_arguments_python_does_not_know_is_taken() -> None:
    check_call(dict.fromkeys, "dict:fromkeys", ("task",))
    check_call(max, "builtins:max", ("task", "answer"))


async def later(split: str, index: int) -> Task:
    return Task("a", "e", "p")


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            lambda split, index: None,
            "None, which is not a task: the function must return sf_core.types.Task(",
        ),
        (lambda split, index: {"task_id": "a"}, "{'task_id': 'a'}, which is not a task: "),
        (lambda split, index: Task(7, "e", "p"), "a task whose task_id is 7, which is not a text"),  # type: ignore[arg-type]
        (later, "a coroutine: the function must not be async, and must return sf_core.types.Task("),
    ],
)
def test_what_is_no_task_is_refused_with_the_function_and_its_arguments(
    function: Callable[..., Any], told: str
) -> None:
    asked = f'my:tasks ({place_of(function)}) called with ("train", 3) returned '
    with pytest.raises(NoTaskError, match="^" + re.escape(asked + told)):
        require_tasks(function, "my:tasks")("train", 3)


def test_what_is_no_task_of_a_part_is_refused_with_the_name_of_the_part() -> None:
    given = require_tasks(lambda split, index, source: source, "my:tasks")
    with pytest.raises(
        NoTaskError, match=r' called with \("holdout", 2, "code"\) returned \'code\', which is not a task'
    ):
        given("holdout", 2, "code")


texts = st.text(max_size=3)
built = st.builds(Task, texts, texts, texts, texts, st.dictionaries(texts, st.integers() | texts, max_size=2))


@given(built, built)
def test_tasks_differ_if_they_are_not_equal(one: Task, other: Task) -> None:
    assert bool(find_difference(one, other)) is (one != other)


def test_the_field_that_differs_is_named() -> None:
    one = Task("a", "e", "p", metadata={"n": 1})
    other = Task("a", "e", "p", metadata={"n": 2})
    assert find_difference(one, other) == "metadata was {'n': 1} and then {'n': 2}"


def test_arrays_are_compared_and_what_is_not_json_is_not() -> None:
    def holding(value: object) -> Task:
        return Task("a", "e", "p", metadata={"held": value})

    assert find_difference(holding(np.arange(3)), holding(np.arange(3))) == ""
    assert find_difference(holding(np.arange(3)), holding(np.arange(4))) != ""
    assert find_difference(holding(object()), holding(object())) == ""
