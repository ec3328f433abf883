"""The threat model names, for each of its statements, a test that checks the statement."""

from __future__ import annotations

import re

import pytest

from docs.build.repository import ROOT

PAGE = ROOT / "docs" / "concepts" / "threat-model.md"

NOT_PROTECTED = "says what is not protected"
ADVICE = "is advice"
OTHERS = "is a fact about other people's software"

WITHOUT_TEST = {
    "Plain `prefect server start` and `dask scheduler`": OTHERS,
    "The lock protects against mistakes, not against programs": NOT_PROTECTED,
    "Your code runs with your user account": NOT_PROTECTED,
    "Run code that you do not trust on separate agent workers": ADVICE,
    "The command runs with the user account of its worker": NOT_PROTECTED,
    "This person can damage a run": NOT_PROTECTED,
    "Another user can reach Dask's scheduler and Prefect": NOT_PROTECTED,
    "The data plane has no TLS": NOT_PROTECTED,
    "The logs contain the output and the errors of your code": NOT_PROTECTED,
    "No key of SeamlessFlow protects a scheduler": NOT_PROTECTED,
    "Only Dask reads pickles": "is checked by an import contract (pyproject.toml)",
}
"""Beginnings of the statements that no test can check, and why."""

_BULLET = re.compile(r"^- (.+(?:\n  .+)*)", re.MULTILINE)
_NAMES = re.compile(r"\(((?:[\w/]+/)?test_\w+\.py(?:,\s+(?:[\w/]+/)?test_\w+\.py)*)\)")

STATEMENTS = [re.sub(r"\s+", " ", found[1]) for found in _BULLET.finditer(PAGE.read_text(encoding="utf-8"))]


def named_tests(statement: str) -> list[str]:
    return [name.strip() for names in _NAMES.findall(statement) for name in names.split(",")]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement[:40])
def test_a_statement_names_files_of_tests_or_is_known_to_have_none(statement: str) -> None:
    names = named_tests(statement)
    for name in names:
        found = [
            path for path in ROOT.joinpath("tests").rglob("test_*.py") if path.as_posix().endswith(f"/{name}")
        ]
        assert len(found) == 1, f"{name} names {len(found)} files of tests"
    is_known = any(statement.startswith(beginning) for beginning in WITHOUT_TEST)
    assert bool(names) != is_known, "name the test of this statement, or add the statement to WITHOUT_TEST"


def test_every_exception_is_a_statement_of_the_page() -> None:
    assert len(STATEMENTS) > 50
    for beginning in WITHOUT_TEST:
        assert sum(statement.startswith(beginning) for statement in STATEMENTS) == 1, beginning


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("The key is safe.", []),
        ("The key is safe (test_a.py).", ["test_a.py"]),
        ("The key (see test_a.py) is safe.", []),
        ("One (test_a.py). Two (cli/test_b.py, test_c.py).", ["test_a.py", "cli/test_b.py", "test_c.py"]),
    ],
)
def test_names_stand_in_brackets(statement: str, names: list[str]) -> None:
    assert named_tests(statement) == names
