"""Which complete groups count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sf_core.config import RolloutConfig
from sf_core.recipes.gates import GATE_REASONS, All, AnyGate, Mixed, Varied, kind_of, num_right
from sf_core.recipes.outcomes import Result, Success

GATE: TypeAdapter[Any] = TypeAdapter(AnyGate)

scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=12)


def results(rewards: list[float], scores: list[float] | None = None) -> tuple[Result, ...]:
    return tuple(Result(r, s, 1, "ok") for r, s in zip(rewards, scores or rewards, strict=True))


@pytest.mark.parametrize(
    ("rewards", "refusal"),
    [
        ([1.0, 1.0], "equal_rewards"),
        ([0.1 + 0.2, 0.3], "equal_rewards"),
        # 0.7 as float32
        ([0.7, 0.699999988079071], "equal_rewards"),
        ([0.0, 0.0, 2e-6], ""),
        ([0.5], "equal_rewards"),
        ([], "equal_rewards"),
    ],
)
def test_rewards_that_differ_by_rounding_only_do_not_vary(rewards: list[float], refusal: str) -> None:
    assert Varied().refusal(results(rewards), None) == refusal
    assert All().refusal(results(rewards), None) == ""


def test_with_a_success_verdicts_vary_and_not_rewards() -> None:
    success = Success(part="answer")
    shaped = results([1.1, 1.2], [1.0, 1.0])
    assert Varied().refusal(shaped, None) == "" and Varied().refusal(shaped, success) == "one_outcome"
    assert Varied().refusal(results([0.5, 0.5], [1.0, 0.0]), success) == ""
    assert Varied().refusal(results([0.4, 0.0]), Success(at_least=0.5)) == "one_outcome"


@given(scores, st.sampled_from([0.25, 0.5, 1.0]))
def test_a_session_is_right_from_the_bound_on(values: list[float], at_least: float) -> None:
    assert num_right(results(values), Success(at_least=at_least)) == len([v for v in values if v >= at_least])


@pytest.mark.parametrize(
    ("score", "is_right"), [(0.7 + 0.2 + 0.1, True), (0.99999994, True), (0.9999, False)]
)
def test_rounding_makes_no_session_wrong(score: float, is_right: bool) -> None:
    assert Success().is_right(score) == is_right


@given(scores, st.integers(1, 4))
def test_mixed_wants_so_many_right_and_so_many_wrong(values: list[float], least: int) -> None:
    right = values.count(1.0)
    passes = right >= least and len(values) - right >= least
    for success in (None, Success()):
        assert Mixed(least=least).refusal(results(values), success) == ("" if passes else "not_mixed")


@given(scores, st.sampled_from([0.25, 0.5, 1.0]))
def test_one_right_and_one_wrong_are_mixed_where_verdicts_vary(values: list[float], at_least: float) -> None:
    success = Success(at_least=at_least)
    refusals = [gate.refusal(results(values), success) for gate in (Varied(), Mixed())]
    assert bool(refusals[0]) == bool(refusals[1])


@given(
    scores, st.sampled_from([All(), Varied(), Mixed(), Mixed(least=2)]), st.sampled_from([None, Success()])
)
def test_the_words_of_a_refusal_are_known(values: list[float], gate: Any, success: Success | None) -> None:
    assert gate.refusal(results(values), success) in ("", *GATE_REASONS)


@given(scores)
def test_a_group_is_of_one_kind(values: list[float]) -> None:
    kind = {0: "wrong", len(values): "right"}.get(values.count(1.0), "mixed") if values else "wrong"
    assert kind_of(results(values), Success()) == kind


@given(scores, st.integers(1, 5))
def test_a_higher_least_never_lets_more_through(values: list[float], least: int) -> None:
    if not Mixed(least=least + 1).refusal(results(values), None):
        assert not Mixed(least=least).refusal(results(values), None)


def test_a_plain_name_stands_for_the_gate_with_its_defaults() -> None:
    assert [GATE.validate_python(name) for name in ("all", "varied", "mixed")] == [All(), Varied(), Mixed()]
    assert GATE.validate_python({"kind": "mixed", "least": 2}) == Mixed(least=2)


def test_a_configuration_stored_by_an_earlier_version_is_read() -> None:
    for stored, gate in (("all", All()), ("varied", Varied())):
        found = RolloutConfig.model_validate_json(f'{{"gate": "{stored}"}}')
        assert found.gate == gate
        assert RolloutConfig.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize("wrong", ["half", {"kind": "half"}, {"kind": "mixed", "least": 0}, 1])
def test_what_is_no_gate_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        GATE.validate_python(wrong)
