"""Two small libraries, of which repositories with faults are generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.repositories.libraries import Library
from sf_core.environments.repositories.environment import Repositories

LISTS = '''\
def chunks(items, size):
    """Parts of this size, the last one perhaps shorter."""
    if size < 1:
        raise ValueError("size must be at least 1")
    return [items[start : start + size] for start in range(0, len(items), size)]


def middle(items):
    return sorted(items)[len(items) // 2]


def gaps(items):
    return [after - before for before, after in zip(items, items[1:])]
'''

TEST_LISTS = """\
import unittest

from lists.lists import chunks, gaps, middle


class ChunksTest(unittest.TestCase):
    def test_parts(self):
        self.assertEqual(chunks([1, 2, 3], 2), [[1, 2], [3]])

    def test_no_size(self):
        with self.assertRaises(ValueError):
            chunks([1], 0)


def test_middle():
    assert middle([3, 1, 2]) == 2


def test_gaps():
    found = gaps([1, 4, 9])
    assert found == [3, 5]
"""

WORDS = """\
def is_palindrome(word):
    letters = [letter for letter in word.lower() if letter.isalpha()]
    return letters == letters[::-1]


def count(text, word):
    return text.lower().split().count(word.lower())


def shorten(text, width):
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."
"""

TEST_WORDS = """\
import pytest

from words import count, is_palindrome, shorten


@pytest.mark.parametrize("word", ["anna", "Never odd or even"])
def test_palindromes(word):
    assert is_palindrome(word)


def test_no_palindrome():
    assert not is_palindrome("ab")


def test_count():
    assert count("a b A", "a") == 2


def test_shorten():
    assert shorten("abcdefgh", 5) == "ab..."


def test_short_enough():
    assert shorten("abcde", 5) == "abcde"
"""

FILES = {
    "lists/__init__.py": "",
    "lists/lists.py": LISTS,
    "lists/tests/__init__.py": "",
    "lists/tests/test_lists.py": TEST_LISTS,
    "words.py": WORDS,
    "test_words.py": TEST_WORDS,
}


def make_libraries(place: Path) -> list[Library]:
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
    tests = ("lists/tests/test_*.py",)
    inits = ("lists/**/__init__.py",)
    return [
        Library("acme/lists", ("lists/lists.py",), tests, inits, place=place),
        Library("acme/words", ("words.py",), ("test_words.py",), place=place),
    ]


MakeRepositories = Callable[..., Repositories]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "dataset.jsonl").read_text(encoding="utf-8").splitlines()]


async def score(environment: Repositories, row: dict[str, Any], answer: Any) -> float:
    return await environment.score(row["instance_id"], answer)
