import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sf_core.recipes.advantages import Grpo, NoAdvantage
from sf_core.recipes.samples import Samples
from sf_core.recipes.teachers import Teacher
from sf_core.recipes.weights import Fresh, weigh
from tests.bench.closeness import assert_rounded
from tests.sf_core.recipes.batches import samples

LOGPROBS = arrays(np.float32, 12, elements=st.floats(-20, 0, width=32))
MASKS = arrays(np.bool_, 12)


def row(mask: np.ndarray, start: np.ndarray, teacher: np.ndarray) -> Samples:
    scores = {"start": [np.where(mask, start, 0)], "teacher": [np.where(mask, teacher, 0)]}
    return samples([1.0], [0], masks=[mask], versions=[np.zeros(len(mask), np.int32)], scores=scores)


@given(LOGPROBS, LOGPROBS, MASKS, st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.1, 10))
def test_a_sampled_divergence_is_its_formula(
    start: np.ndarray, teacher: np.ndarray, mask: np.ndarray, discount: float, coefficient: float
) -> None:
    made = Teacher(divergence="sampled", discount=discount, coefficient=coefficient)
    [added] = made(row(mask, start, teacher))
    places = np.flatnonzero(mask)
    expected = np.zeros(len(mask))
    for t, place in enumerate(places):
        gains = [float(teacher[v]) - float(start[v]) for v in places[t:]]
        expected[place] = coefficient * sum(discount**later * gain for later, gain in enumerate(gains))
    assert added.dtype == np.float32
    assert_rounded(added, expected, 1)


@given(LOGPROBS, MASKS, st.sampled_from([0.0, 0.7]))
def test_a_teacher_that_is_the_policy_adds_exactly_nothing(
    start: np.ndarray, mask: np.ndarray, discount: float
) -> None:
    [added] = Teacher(divergence="sampled", discount=discount)(row(mask, start, start))
    assert not added.any()


def test_what_the_teacher_says_is_added_to_the_advantage_and_shaped_by_weights() -> None:
    mask = np.array([False, True, True])
    scores = {
        "start": [np.where(mask, -1.0, 0).astype(np.float32)] * 2,
        "teacher": [np.where(mask, -3.0, 0).astype(np.float32), np.where(mask, -0.5, 0).astype(np.float32)],
    }
    both = samples(
        [1.0, 0.0], [0, 0], scores=scores, versions=[np.array([-1, 0, 5], np.int32)] * 2, iteration=5
    )
    teacher = Teacher(divergence="sampled", coefficient=2.0)
    alone, _ = weigh(both, NoAdvantage(), (), teacher)
    np.testing.assert_allclose(alone, [[0, -4, -4], [0, 1, 1]])
    added, factors = weigh(both, Grpo(scale="none"), (Fresh(max_lag=1),), teacher)
    np.testing.assert_allclose(added, [[0, -3.5, -3.5], [0, 0.5, 0.5]])
    np.testing.assert_allclose(factors, [[1, 0, 1], [1, 0, 1]])
    # a loss over the vocabulary is no advantage
    plain, _ = weigh(both, NoAdvantage(), (), Teacher(divergence="reverse"))
    assert not np.any(plain)


def test_a_discount_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="leave `discount` out: it has no effect with `divergence: forward`"):
        Teacher(divergence="forward", discount=0.5)
