"""The kinds of the benchmark's tasks: exact shares, kinds that say what they are, and rewards."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.recipe_tasks import AGO, BLOCK, RecipeTasks, told
from sf_core.environments.splits import split_of
from sf_core.types import Task

MIXED = RecipeTasks(easy=0.3, impossible=0.3, random=0.1, hard=0.1)


@given(st.integers(0, 2**32))
def test_each_block_has_the_shares(block: int) -> None:
    kinds = Counter(MIXED.kind(block * BLOCK + place) for place in range(BLOCK))
    assert kinds == {"easy": 6, "impossible": 6, "random": 2, "hard": 2, "live": 4}


@given(st.integers(0, 2**32))
def test_a_task_is_of_its_kind_and_of_its_split(index: int) -> None:
    task = MIXED.tasks("train", index)
    assert task == MIXED.tasks("train", index)
    assert task.environment == MIXED.kind(index)
    assert split_of(task.prompt) == "train"
    letters = {"easy": (2, 2), "hard": (8, 10), "impossible": (8, 8)}.get(task.environment)
    if letters:
        assert letters[0] <= len(task.answer) <= letters[1]
    assert (task.answer in task.prompt[::-1] or "+" in task.prompt) != (task.environment == "impossible")


@given(st.integers(0, 2**32))
def test_held_out_tasks_are_live_one_in_five_easy(first: int) -> None:
    found = [MIXED.tasks("holdout", 5 * first + place) for place in range(5)]
    assert [task.environment for task in found] == ["easy", *["live"] * 4]
    assert all(split_of(task.prompt) == "holdout" for task in found)


def test_what_is_shown_is_the_same_whatever_the_shares() -> None:
    assert [MIXED.demonstrate(index) for index in range(50)] == [
        RecipeTasks().demonstrate(index) for index in range(50)
    ]


@pytest.mark.parametrize(("flips", "reward"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_reward_flips_in_training_alone(flips: float, reward: float) -> None:
    tasks = RecipeTasks(flips=flips)
    for split, expected in (("train", reward), ("holdout", 1.0)):
        task = tasks.tasks(split, 1)  # type: ignore[arg-type]
        assert tasks.reward(task, task.answer) == {"answer": expected}


def test_random_rewards_do_not_look_at_the_answer() -> None:
    task = Task("random-train-0", "random", "Spell", "right", {"split": "train"})
    for answer in ("right", "wrong"):
        assert {MIXED.reward(task, answer)["answer"] for _ in range(100)} == {0.0, 1.0}


def test_a_group_is_told_what_came_of_another() -> None:
    tasks = RecipeTasks(tells_others=True)
    task = tasks.tasks("train", 0)

    def reward(group: int, text: str) -> dict[str, float]:
        return tasks.reward(task, {"text": text, "place": ("run", group, 3)})

    told.clear()
    reward(0, task.answer)
    reward(1, "wrong")
    assert reward(AGO, "wrong") == {"answer": 0.0, "told": 1.0, "rest": -1.0}
    assert reward(AGO + 1, task.answer) == {"answer": 1.0, "told": 0.0, "rest": 0.0}
