from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.environments.splits import HOLDOUT_SIZE, Question, Splits


def few_questions(number: int) -> Question:
    """Generator that repeats itself: many training numbers give the question of a held-out number."""
    drawn = Random(number).randrange(2 * HOLDOUT_SIZE)
    return Question(prompt=f"{drawn}?", answer=str(drawn))


FEW = Splits("few", few_questions)
HELD_OUT = {FEW.task("holdout", i).prompt for i in range(HOLDOUT_SIZE)}


@given(st.integers(0, 10**9))
def test_no_training_task_has_a_held_out_prompt(index: int) -> None:
    assert FEW.task("train", index).prompt not in HELD_OUT


def test_a_generator_with_too_few_questions_is_refused() -> None:
    with pytest.raises(ValueError, match="too few different prompts"):
        Splits("one", lambda number: Question("?", "!")).task("train", 0)


def test_equal_arguments_give_equal_tasks() -> None:
    assert Splits("few", few_questions).task("train", 5) == Splits("few", few_questions).task("train", 5)


def test_task_ids_tell_the_splits_apart() -> None:
    splits = Splits("few", few_questions)
    assert splits.task("train", 5).task_id != splits.task("holdout", 5).task_id


@pytest.mark.parametrize(("split", "index"), [("holdout", HOLDOUT_SIZE), ("holdout", -1), ("train", -1)])
def test_an_index_outside_the_split_is_refused(split: str, index: int) -> None:
    with pytest.raises(ValueError, match="index"):
        Splits("few", few_questions).task(split, index)  # type: ignore[arg-type]
