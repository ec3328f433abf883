from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.recipes.group_rewards import majority
from sf_core.types import Task

TASK = Task("t", "e", "?")


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        (["4", " 4\n", "5"], [1.0, 1.0, 0.0]),
        (["Paris", "paris", "Rome", "PARIS"], [1.0, 1.0, 0.0, 1.0]),
        (["4", "5"], None),
        (["4", "4", "5", "5", "6"], None),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}, None], [1.0, 1.0, 0.0]),
        (["7"], [1.0]),
    ],
)
def test_right_is_what_most_sessions_answer(answers: list[Any], rewards: list[float] | None) -> None:
    assert majority(TASK, answers) == rewards


@given(answers=st.lists(st.sampled_from("abc"), min_size=1))
def test_the_order_of_answers_changes_nothing(answers: list[str]) -> None:
    rewards = majority(TASK, answers)
    backward = majority(TASK, answers[::-1])
    assert backward == (None if rewards is None else rewards[::-1])
