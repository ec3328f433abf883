import math

import numpy as np
import pytest

from sf_core.recipes.advantages import Grpo
from sf_core.recipes.samples import Samples, Values
from sf_core.recipes.weights import (
    CustomWeight,
    EntropyConfidence,
    Fresh,
    Gated,
    Overlong,
    Surprising,
    Unparsed,
    Weight,
    weigh,
)
from tests.sf_core.recipes.batches import samples

REWARDS = [1.0, 0.0, 1.0, 0.0]
GROUPS = [0, 0, 1, 1]
CUT = np.array([True, False, False, False])


def both(weight: Weight, drawn: Samples) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and weights of all tokens."""
    advantages, weights = weigh(drawn, Grpo(scale="none"), [weight])
    return [row.tolist() for row in advantages], [row.tolist() for row in weights]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Overlong, {"truncated": CUT}),
        (Unparsed, {"statuses": ["unparsed_call", "finished", "timeout", "finished"]}),
    ],
)
def test_a_session_is_left_out_of_the_mean_or_teaches_nothing_in_it(
    kind: type[Overlong] | type[Unparsed], changes: dict[str, object]
) -> None:
    drawn = samples(REWARDS, GROUPS, **changes)
    plain = [[0, 0.5, 0.5], [0, -0.5, -0.5]] * 2
    assert both(kind(), drawn) == (plain, [[1, 0, 0]] + [[1, 1, 1]] * 3)
    assert both(kind(effect="advantage"), drawn) == ([[0, 0, 0], *plain[1:]], [[1, 1, 1]] * 4)


def test_tokens_of_weights_that_are_too_old_are_left_out() -> None:
    versions = [np.array([-1, v, 5], np.int32) for v in (5, 4, 3, 2)]
    drawn = samples(REWARDS, GROUPS, versions=versions, iteration=5)
    _, weights = both(Fresh(max_lag=1), drawn)
    assert weights == [[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 0, 1]]


def of_entropy(entropies: list[list[float]], start: list[list[float]] | None = None) -> Samples:
    scores: dict[str, Values] = {"entropy": [np.array([0, *row], np.float32) for row in entropies]}
    if start is not None:
        scores["start"] = [np.array([0, *row], np.float32) for row in start]
    return samples(REWARDS, GROUPS, scores=scores)


def test_only_the_tokens_of_highest_entropy_count() -> None:
    drawn = of_entropy([[0.1, 0.9], [0.2, 0.3], [0.8, 0.4], [0.5, 0.6]])
    assert Surprising(share=0.25).needs == {"entropy"}
    _, weights = both(Surprising(share=0.25), drawn)
    assert weights == [[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]]


def test_advantages_grow_with_uncertainty_by_no_more_than_twice_the_strength() -> None:
    drawn = of_entropy(
        [[0.0, 0.0], [0.0, 4.0], [0.0, 0.0], [0.0, 0.0]],
        [[-0.01] * 2, [-0.01, -9.0], [-0.01] * 2, [-0.01] * 2],
    )
    advantages, weights = both(EntropyConfidence(strength=0.1), drawn)
    assert advantages[1][2] == pytest.approx(-0.5 * 1.2)
    assert abs(advantages[1][1]) < 0.5 and weights == [[1, 1, 1]] * 4
    same = of_entropy([[0.5, 0.5]] * 4, [[-1.0, -1.0]] * 4)
    assert both(EntropyConfidence(), same)[0][0] == [0, 0.5, 0.5]


def test_a_token_after_which_more_is_expected_teaches_up_to_twice_as_much() -> None:
    scores: dict[str, Values] = {"values": [np.array([0, v, 1.0], np.float32) for v in (0.0, 1.0, 3.0, -9.0)]}
    advantages, weights = both(Gated(), samples(REWARDS, GROUPS, scores=scores))
    firsts = [1 + math.tanh(rise) for rise in (1.0, 0.0, -2.0, 10.0)]
    assert [row[1] for row in advantages] == pytest.approx(
        [half * f for half, f in zip([0.5, -0.5] * 2, firsts, strict=True)]
    )
    assert [row[2] for row in advantages] == [0.5, -0.5] * 2 and weights == [[1, 1, 1]] * 4


def of_first_tokens(drawn: Samples, advantages: Values) -> list[np.ndarray]:
    return [np.arange(len(row)) == 1 for row in advantages]


def negative(drawn: Samples, advantages: Values) -> list[np.ndarray]:
    return [np.full(len(row), -1.0) for row in advantages]


def test_a_function_of_the_users_gives_weights_and_may_give_none_below_zero() -> None:
    drawn = samples(REWARDS, GROUPS)
    path = "tests.sf_core.recipes.test_weights"
    _, weights = both(CustomWeight(function=f"{path}:of_first_tokens"), drawn)
    assert weights == [[1, 1, 0]] * 4
    with pytest.raises(ValueError, match="negative: a weight is negative"):
        both(CustomWeight(function=f"{path}:negative"), drawn)


def test_weights_are_multiplied_and_advantages_shaped_one_after_the_other() -> None:
    versions = [np.array([-1, 3, 5], np.int32)] * 4
    drawn = samples(REWARDS, GROUPS, truncated=CUT, versions=versions, iteration=5)
    plain = [[0, 0.5, 0.5], [0, -0.5, -0.5]] * 2
    for effect, of_first, kept in (("advantage", [1, 0, 1], [0, 0, 0]), ("weight", [1, 0, 0], plain[0])):
        overlong = Overlong.model_validate({"effect": effect})
        advantages, weights = weigh(drawn, Grpo(scale="none"), [overlong, Fresh(max_lag=1)])
        assert [row.tolist() for row in weights] == [of_first, *[[1, 0, 1]] * 3]
        assert [row.tolist() for row in advantages] == [kept, *plain[1:]]
