from __future__ import annotations

import ast

import pytest

from tests.assignments import find_packed
from tests.budgets import count_code_lines, count_tokens

SOURCE = '''"""A module
of two lines."""

def double(number: int) -> int:  # a comment
    """A docstring."""
    return (
        number * 2
    )
'''


def test_code_is_counted_without_comments_and_docstrings() -> None:
    assert count_code_lines(SOURCE) == 4
    # def double ( number : int ) -> int : / return ( number * 2 )
    assert count_tokens(SOURCE) == 10 + 6


@pytest.mark.parametrize("layout", ["a = [1, 2]", "a = [\n    1,\n    2\n]", "a = [1, 2]  # two"])
def test_layout_has_no_tokens(layout: str) -> None:
    assert count_tokens(layout) == 7


@pytest.mark.parametrize(
    "packed",
    [
        "a, b = 1, 2",
        "a, b = b, 2",
        "self.a, self.b = a, make(b)",
        "a[0], b = 1, c[0]",
        "a, (b, c) = x, y",
    ],
)
def test_values_that_do_not_depend_on_each_other_are_refused(packed: str) -> None:
    assert len(list(find_packed(ast.parse(packed)))) == 1


@pytest.mark.parametrize(
    "one",
    [
        # swaps and recurrences
        "a, b = b, a",
        "a, b = b, a + b",
        "a[i], a[j] = a[j], a[i]",
        "self.a, b = 1, self.a",
        # a method may read what is assigned to its object
        "self.a, self.b = a, self.make()",
        # one value that is several
        "a, b = pair",
        "a, *b = 1, 2, 3",
        "a = b = 1",
    ],
)
def test_what_is_one_assignment_is_allowed(one: str) -> None:
    assert list(find_packed(ast.parse(one))) == []
