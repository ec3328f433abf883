from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.stages.sweeps.results import Mean, share_within, t_quantile

# the usual table of Student's t, two-sided 95 %
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "expected"), TABLE.items())
def test_the_quantiles_are_those_of_the_table(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=5e-4)


@given(st.integers(1, 400), st.floats(0, 20), st.floats(0, 20))
def test_the_share_within_grows_with_the_distance(degrees: int, some: float, other: float) -> None:
    near, far = sorted((some, other))
    assert 0 <= share_within(near, degrees) <= share_within(far, degrees) + 1e-12 <= 1 + 1e-9


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_the_interval_is_the_quantile_times_the_standard_error(values: list[float]) -> None:
    mean = Mean.over(values)
    assert mean is not None and mean.half is not None and mean.count == len(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert mean.value == pytest.approx(statistics.fmean(values))
    assert mean.half == pytest.approx(t_quantile(len(values) - 1) * error)


def test_one_run_has_no_interval_and_none_has_no_mean() -> None:
    assert Mean.over([0.5]) == Mean(0.5, None, 1)
    assert Mean.over([]) is None


def test_an_interval_ends_where_values_do() -> None:
    assert Mean(2.0, 5.0, 3).interval(least=0.0) == (0.0, 7.0)
    assert Mean(2.0, 5.0, 3).interval() == (-3.0, 7.0)
    assert Mean(2.0, None, 1).interval() is None


def test_95_of_100_intervals_of_three_draws_hold_the_true_mean() -> None:
    draws = np.random.default_rng(3).normal(7.0, 2.0, (2000, 3)).tolist()
    means = [mean for values in draws if (mean := Mean.over(values)) is not None]
    held = [abs(mean.value - 7.0) <= (mean.half or 0.0) for mean in means]
    assert 0.935 < sum(held) / len(held) < 0.965
