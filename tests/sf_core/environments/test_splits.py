import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.environments.splits import HOLDOUT_SIZE, Question, Splits


def few_questions(number: int) -> Question:
    """Repeats itself: most numbers of the training split ask what a held-out number asks."""
    drawn = number if number < HOLDOUT_SIZE else number * 2654435761 % (2 * HOLDOUT_SIZE)
    return Question(prompt=f"{drawn}?", answer=str(drawn))


@given(st.integers(0, 10**9))
def test_no_training_task_has_a_held_out_prompt(index: int) -> None:
    splits = Splits("few", few_questions)
    held_out = {splits.task("holdout", i).prompt for i in range(HOLDOUT_SIZE)}
    assert splits.task("train", index).prompt not in held_out


def test_equal_arguments_give_equal_tasks() -> None:
    assert Splits("few", few_questions).task("train", 5) == Splits("few", few_questions).task("train", 5)


def test_task_ids_tell_the_splits_apart() -> None:
    splits = Splits("few", few_questions)
    assert splits.task("train", 5).task_id != splits.task("holdout", 5).task_id


@pytest.mark.parametrize(("split", "index"), [("holdout", HOLDOUT_SIZE), ("holdout", -1), ("train", -1)])
def test_an_index_outside_the_split_is_refused(split: str, index: int) -> None:
    with pytest.raises(ValueError, match="index"):
        Splits("few", few_questions).task(split, index)  # type: ignore[arg-type]
