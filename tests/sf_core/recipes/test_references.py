"""Our formulas against other libraries', by what these gave (benchmarks/references.py)."""

import numpy as np
import pytest

from tests.sf_core.recipes import references

THEIRS = dict(np.load(references.FILE))


@pytest.mark.parametrize("name", references.ours())
def test_the_formula_is_theirs(name: str) -> None:
    found = references.differences(THEIRS)[name]
    assert max(found.values()) <= 1e-5


def test_the_references_were_made_of_these_inputs_and_are_small() -> None:
    for name, array in references.inputs().items():
        np.testing.assert_array_equal(THEIRS[f"inputs/{name}"], array)
    assert references.FILE.stat().st_size < 200_000
