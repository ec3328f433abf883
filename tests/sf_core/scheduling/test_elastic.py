from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunnersConfig
from sf_core.scheduling.elastic import Elastic

BOUNDS = RunnersConfig(min=1, max=4, idle_s=30)


def test_it_grows_at_once_and_shrinks_when_fewer_sufficed_for_a_while() -> None:
    elastic = Elastic(BOUNDS, concurrency=10)
    asked = [(0, 0), (1, 25), (20, 11), (31, 0), (32, 0), (50, 0), (51, 0)]
    assert [elastic.count_wanted(now, sessions) for now, sessions in asked] == [1, 3, 3, 3, 2, 2, 1]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 100)), min_size=1))
def test_it_is_the_most_that_was_needed_lately_within_the_bounds(steps: list[tuple[int, int]]) -> None:
    elastic, now, history = Elastic(BOUNDS, concurrency=10), 0, []
    for seconds, sessions in steps:
        now += seconds
        history.append((now, -(-sessions // 10)))
        most = max(needed for at, needed in history if at >= now - 30)
        assert elastic.count_wanted(now, sessions) == min(max(most, 1), 4)
