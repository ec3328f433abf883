from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.runner import Mutation, Runner, TableError, read_table

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.toml")

CODE = """\
def double(number):
    return number * 2


def wait():
    return None
"""
TESTS = """\
from sf_core.numbers import double, wait


def test_double():
    assert double(2) == 4
    wait()
"""


def test_every_mutation_is_an_edit_of_the_sources_as_they_are() -> None:
    for mutation in read_table(TABLE):
        mutation.applied(ROOT)
        files = [test.removeprefix("--deselect=").partition("::")[0] for test in mutation.tests]
        assert all((ROOT / file).exists() for file in files), mutation


def mutation(old: str, new: str, tests: tuple[str, ...] = ("tests/test_numbers.py",)) -> Mutation:
    return Mutation("sf_core/numbers.py", "wrong", old, new, tests)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sources of one module."""
    root = tmp_path / "root"
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "sf_core/__init__.py": "",
        "sf_core/numbers.py": CODE,
        "tests/__init__.py": "",
        "tests/test_numbers.py": TESTS,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_no_test_notices_survives(root: Path, tmp_path: Path) -> None:
    caught = mutation("number * 2", "number * 3")
    # 2 * 2 is 2 + 2
    survives = mutation("number * 2", "number + 2")
    cannot_begin = mutation("def double", "def triple")
    runner = Runner(root, tmp_path / "copies", num_workers=2, deadline_s=100.0)
    runner.check([caught])
    found = [(m, result.verdict) for m, result in runner.run([caught, survives, cannot_begin, survives])]
    assert dict(found) == {caught: "caught", survives: "SURVIVED", cannot_begin: "BROKEN"}
    assert len(found) == 4
    assert (root / "sf_core/numbers.py").read_text() == CODE


def test_tests_that_hang_have_noticed(root: Path, tmp_path: Path) -> None:
    runner = Runner(root, tmp_path / "copies", num_workers=1, deadline_s=1.0)
    [(_, result)] = runner.run([mutation("    return None", "    while True: pass")])
    assert result.verdict == "hung"


def test_a_table_that_does_not_fit_is_refused(root: Path, tmp_path: Path) -> None:
    runner = Runner(root, tmp_path / "copies", num_workers=1, deadline_s=100.0)
    for wrong, sentence in [
        (mutation("number / 2", "number"), "numbers.py: wrong: expected its old text once, found it 0 times"),
        (mutation("return", "yield"), "expected its old text once, found it 2 times"),
        (mutation("number * 2", "number *"), "the new text is no Python: invalid syntax"),
        (mutation("number * 2", "1", tests=("tests/gone.py",)), "tests/gone.py: BROKEN as it is"),
    ]:
        with pytest.raises(TableError, match=sentence):
            runner.check([wrong])


def test_tests_that_fail_without_any_mutation_judge_nothing(root: Path, tmp_path: Path) -> None:
    (root / "tests/test_numbers.py").write_text(TESTS.replace("== 4", "== 5"))
    runner = Runner(root, tmp_path / "copies", num_workers=1, deadline_s=100.0)
    with pytest.raises(TableError, match=r"tests/test_numbers\.py: caught as it is:\n[^$]*assert 4 == 5"):
        runner.check([mutation("number * 2", "number * 3")])
