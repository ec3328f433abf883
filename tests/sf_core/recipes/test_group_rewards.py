from __future__ import annotations

import time
from decimal import Decimal
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
        (["", "", "4"], [0.0, 0.0, 1.0]),
        (["", " \n", None, [], {"text": ""}], None),
        ([0, "0", "-0.0", "", False], [1.0, 1.0, 1.0, 0.0, 0.0]),
        (["4", "4.0", "+4.", "40e-1", 4, 4.0, "5", "5", "5"], [1.0] * 6 + [0.0] * 3),
        ([0.1, "0.1", "0.1000000000000000055"], [1.0, 1.0, 0.0]),
        (["1e99999999999999999999", "1E99999999999999999999", "1"], [1.0, 1.0, 0.0]),
        (["nan", "NaN", "inf"], [1.0, 1.0, 0.0]),
        ([True, "true", 1], [1.0, 1.0, 0.0]),
        ([["4", {"x": "A"}], [4.0, {"x": " a\n"}], ["5", {"x": "A"}]], [1.0, 1.0, 0.0]),
    ],
)
def test_right_is_what_most_sessions_answer(answers: list[Any], rewards: list[float] | None) -> None:
    assert majority(TASK, answers) == rewards


@pytest.mark.parametrize("end", ["x", ".x", "ex", "e1x"])
def test_an_answer_of_many_digits_is_compared_in_the_time_of_reading_it(end: str) -> None:
    started = time.process_time()
    assert majority(TASK, ["1" * 30_000 + end, "1" * 30_000]) is None
    # policies repeat digits; time that grew with the square of the length was 16 s
    assert time.process_time() - started < 2


@given(answers=st.lists(st.sampled_from("abc"), min_size=1))
def test_the_order_of_answers_changes_nothing(answers: list[str]) -> None:
    rewards = majority(TASK, answers)
    backward = majority(TASK, answers[::-1])
    assert backward == (None if rewards is None else rewards[::-1])


ABSENT: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.text(" \t\n\N{NO-BREAK SPACE}", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(answers=st.lists(st.sampled_from(["a", "b", 4, False]) | ABSENT, min_size=1), empty=ABSENT)
def test_an_absent_answer_has_no_vote_and_earns_nothing(answers: list[Any], empty: Any) -> None:
    rewards = majority(TASK, [empty, *answers])
    assert rewards == ((others := majority(TASK, answers)) and [0.0, *others])


def spellings(number: Decimal) -> st.SearchStrategy[Any]:
    """Ways in which agents write a number."""
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    written = f"{'-' * sign}{''.join(map(str, digits))}"
    texts = [
        f"{number:f}",
        f"{written}e{exponent}",
        f"{written}00E{exponent - 2}",
        f" {written}.0e{exponent}\n",
    ]
    exact = [one for one in (float(number), int(number)) if Decimal(repr(one)) == number]
    return st.sampled_from([*texts, *exact])


NUMBERS = st.decimals(-(10**9), 10**9, places=4) | st.integers(-(2**80), 2**80).map(Decimal)


@given(st.data(), st.lists(NUMBERS, min_size=1, max_size=4))
def test_numbers_are_compared_by_their_exact_values(data: st.DataObject, numbers: list[Decimal]) -> None:
    written = [data.draw(spellings(number)) for number in numbers]
    plain = [f"{number.normalize() if number else Decimal(0)!s}" for number in numbers]
    expected = majority(TASK, [f"is {one}" for one in plain])  # as texts that are no numbers
    assert majority(TASK, written) == expected
