from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sf_core.recipes.outcomes import are_equal

parts = st.lists(st.floats(-1000, 1000), min_size=1, max_size=50)


@given(parts, st.randoms())
def test_sums_of_the_same_parts_in_any_order_are_equal(values: list[float], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    low, high = sorted([sum(values), sum(shuffled)])
    assert are_equal(low, high)


@given(st.floats(-100, 100), st.floats(1e-6, 1e6))
def test_what_a_reward_function_tells_apart_is_not_equal(reward: float, difference: float) -> None:
    assert not are_equal(reward, reward + difference)


def test_arrays_are_compared_element_by_element() -> None:
    low = np.array([0.0, 1.0, -5e6])
    high = np.array([1e-12, 2.0, -5e6 + 1e-3])
    assert are_equal(low, high).tolist() == [True, False, True]
