import doctest
from typing import get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config.run_config import AdvantageName
from sf_core.recipes import advantages
from sf_core.recipes.advantages import ADVANTAGES, EPSILON, group_relative

sessions = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=40)


def by_group(values: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    return [values[groups == group] for group in np.unique(groups)]


def test_examples() -> None:
    assert doctest.testmod(advantages).failed == 0


@given(sessions, st.booleans())
def test_advantages_of_a_group_sum_to_zero(drawn: list[tuple[float, int]], scale: bool) -> None:
    rewards, groups = (np.array(column) for column in zip(*drawn, strict=True))
    for group in by_group(group_relative(rewards, groups, scale=scale), groups):
        np.testing.assert_allclose(group.sum(), 0.0, atol=1e-3)


@given(sessions)
def test_scaled_advantages_have_deviation_one_or_less_where_rewards_hardly_differ(
    drawn: list[tuple[float, int]],
) -> None:
    rewards, groups = (np.array(column, np.float64) for column in zip(*drawn, strict=True))
    advantages = group_relative(rewards, groups)
    for given_to, group in zip(by_group(rewards, groups), by_group(advantages, groups), strict=True):
        deviation = given_to.std()
        np.testing.assert_allclose(group.std(), deviation / (deviation + EPSILON), atol=0.02)


@given(sessions, st.floats(-5, 5, width=32))
def test_a_constant_added_to_all_rewards_changes_nothing(
    drawn: list[tuple[float, int]], constant: float
) -> None:
    rewards, groups = (np.array(column) for column in zip(*drawn, strict=True))
    plain = group_relative(rewards, groups, scale=False)
    shifted = group_relative(rewards + constant, groups, scale=False)
    np.testing.assert_allclose(plain, shifted, atol=1e-4)


def test_equal_rewards_give_exact_zeros_in_spite_of_rounding() -> None:
    for scale in (True, False):
        assert not group_relative([0.1] * 7, ["a"] * 7, scale=scale).any()
        assert not group_relative([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], ["a"] * 2, scale=scale).any()


def test_a_reward_that_is_the_mean_of_its_group_gives_exactly_zero() -> None:
    assert (group_relative([0.1, 0.2, 0.3], ["a"] * 3) == 0).tolist() == [False, True, False]


def test_the_advantages_are_those_that_a_configuration_can_name() -> None:
    assert [*ADVANTAGES] == [*get_args(AdvantageName)]
