"""Selections: which sessions of a batch train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sf_core.recipes.selections import AnySelection, Extremes
from tests.sf_core.recipes.batches import samples

SELECTION: TypeAdapter[Any] = TypeAdapter(AnySelection)

# few different rewards, so that many are equal
sessions = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), min_size=1, max_size=40)
keeps = st.integers(1, 5).map(lambda half: 2 * half)


def kept(rewards: list[float], keep: int) -> list[int]:
    """Places of the sessions of one group that train."""
    return np.flatnonzero(Extremes(keep=keep)(samples(rewards, [0] * len(rewards)))).tolist()


@given(sessions, keeps)
def test_half_of_what_is_kept_is_the_best_of_its_group_and_half_the_worst(
    drawn: list[tuple[int, int]], keep: int
) -> None:
    rewards, groups = (np.array(column, np.int64) for column in zip(*drawn, strict=True))
    found = Extremes(keep=keep)(samples(rewards.tolist(), groups.tolist()))
    for group in set(groups.tolist()):
        places = np.flatnonzero(groups == group)
        # of equal rewards the earlier one is the lower
        ranked = sorted(places.tolist(), key=lambda place: (rewards[place], place))
        expected = (
            ranked if len(ranked) <= keep else [*ranked[: keep // 2], *ranked[len(ranked) - keep // 2 :]]
        )
        assert places[found[places]].tolist() == sorted(expected)


@given(sessions, keeps, st.permutations(range(4)))
def test_a_group_is_judged_by_itself(drawn: list[tuple[int, int]], keep: int, places: list[int]) -> None:
    rewards, groups = map(list, zip(*drawn, strict=True))
    together = Extremes(keep=keep)(samples(rewards, groups))
    # the others come elsewhere in the batch, and the sessions of a group in the same order
    order = sorted(range(len(drawn)), key=lambda i: places[groups[i]])
    apart = Extremes(keep=keep)(samples([rewards[i] for i in order], [groups[i] for i in order]))
    assert apart.tolist() == together[order].tolist()


@pytest.mark.parametrize(
    ("rewards", "keep", "places"),
    [
        ([0.5, 1.0, 0.0, 0.25, 0.75, 0.1], 2, [1, 2]),
        ([0.5, 1.0, 0.0, 0.25, 0.75, 0.1], 4, [1, 2, 4, 5]),
        ([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 4, [0, 1, 2, 5]),
        ([1.0] * 6, 2, [0, 5]),
        ([0.0, 1.0, 2.0, 3.0], 4, [0, 1, 2, 3]),
        ([0.0, 1.0, 2.0], 4, [0, 1, 2]),
    ],
)
def test_the_extremes_of_a_group(rewards: list[float], keep: int, places: list[int]) -> None:
    assert kept(rewards, keep) == places


def test_a_selection_is_named_by_its_kind_or_its_settings_alone() -> None:
    assert SELECTION.validate_python({"kind": "extremes", "keep": 8}) == Extremes(keep=8)
    assert SELECTION.validate_python({"keep": 8}) == Extremes(keep=8)
    with pytest.raises(ValidationError, match="keep\n  Field required"):
        SELECTION.validate_python("extremes")
