from __future__ import annotations

import ast
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.mutations import runner
from tests.mutations.modules import Modules

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.toml")

CODE = """\
def double(number):
    result = number * 2
    return result


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
    modules = Modules(ROOT)
    faults: list[str] = []
    for mutation in runner.read_table(TABLE):
        try:
            mutation.applied(modules)
        except runner.TableError as error:
            faults.append(str(error))
        files = [test.removeprefix("--deselect=").partition("::")[0] for test in mutation.tests]
        assert all((ROOT / file).exists() for file in files), mutation
    # all at once: a renaming may touch several
    assert not faults, "\n".join(faults)


def mutation(
    old: str, new: str, tests: tuple[str, ...] = ("tests/test_numbers.py",), function: str = "double"
) -> runner.Mutation:
    return runner.Mutation(function, "wrong", old, new, tests)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
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
        (root / name).write_text(text, encoding="utf-8")
    return root


def judge(
    root: Path, mutations: list[runner.Mutation], deadline_s: float = 100.0
) -> list[tuple[runner.Mutation, str]]:
    """Judge in a runner's own process, because this one may have threads, which no fork survives."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_judge, root, mutations, deadline_s).result()


def _judge(
    root: Path, mutations: list[runner.Mutation], deadline_s: float
) -> list[tuple[runner.Mutation, str]]:
    forks = runner.Runner(root, root.parent / "copies", num_workers=2, deadline_s=deadline_s)
    if deadline_s > 1:
        forks.check(mutations)
    return [(mutation, result.verdict) for mutation, result in forks.run(mutations)]


def test_what_no_test_notices_survives(sources: Path) -> None:
    caught = mutation("$number * 2", "$number * 3")
    # 2 * 2 is 2 + 2
    survives = mutation("$number * 2", "$number + 2")
    cannot_begin = mutation("def double(...):\n    ...", "raise ValueError")
    found = judge(sources, [caught, survives, cannot_begin, survives])
    assert dict(found) == {caught: "caught", survives: "SURVIVED", cannot_begin: "BROKEN"}
    assert len(found) == 4
    assert (sources / "sf_core/numbers.py").read_text(encoding="utf-8") == CODE


def test_tests_that_hang_have_noticed(sources: Path) -> None:
    hangs = mutation("return None", "while True:\n    pass", function="wait")
    assert judge(sources, [hangs], deadline_s=1.0) == [(hangs, "hung")]


REFUSED = {
    "no module defines it": mutation("1", "2", function="triple"),
    "its old text matches nothing in sf_core/numbers.py: a name in it may have changed, or this is a "
    "namesake of the function": mutation("$n / 2", "$n"),
    "its old text is to match once, and matches 3 times in sf_core/numbers.py": mutation("$n", "1"),
    "'$n *' is no Python: invalid syntax": mutation("$n * 2", "$n *"),
    "the old text has no $m": mutation("$n * 2", "$m * 2"),
    "the new text has more `...` than the old one": mutation("$n * 2", "max(...)"),
    "its new text is no Python there: 'break' outside loop": mutation("return $n", "break"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_edit_of_the_sources_is_refused(sources: Path, fault: str) -> None:
    wrong = REFUSED[fault]
    with pytest.raises(runner.TableError) as refused:
        wrong.applied(Modules(sources))
    sentence = f"{wrong.function}: wrong: {fault}; mend this entry of tests/mutations/table.toml"
    assert str(refused.value) == sentence


def test_a_mutation_is_found_after_renamings_and_a_move(sources: Path) -> None:
    (sources / "sf_core/numbers.py").unlink()
    (sources / "sf_core/doubling.py").write_text(
        CODE.replace("number", "factor").replace("result", "found"), encoding="utf-8"
    )
    moved = mutation("$result = $number * 2", "$result = 2").applied(Modules(sources))
    assert moved.file == "sf_core/doubling.py"
    assert "found = 2" in ast.unparse(moved.tree)


def test_tests_that_are_not_there_judge_nothing(sources: Path) -> None:
    with pytest.raises(runner.TableError, match=r"tests/gone\.py: BROKEN as it is"):
        judge(sources, [mutation("$number * 2", "1", tests=("tests/gone.py",))])


def test_tests_that_fail_without_any_mutation_judge_nothing(sources: Path) -> None:
    (sources / "tests/test_numbers.py").write_text(TESTS.replace("== 4", "== 5"), encoding="utf-8")
    with pytest.raises(
        runner.TableError, match=r"tests/test_numbers\.py: caught as it is:\n[^$]*assert 4 == 5"
    ):
        judge(sources, [mutation("$number * 2", "$number * 3")])
