from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.waits import patience
from tests.budgets import count_code_lines, open_flaky

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pathlib, pytest

{mark}
def test_that_fails_beside_others():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError

{mark}
def test_that_sets_have_one_order():
    assert os.environ["PYTHONHASHSEED"] == "0"

{mark}
def test_that_fails():
    assert not pathlib.Path("broken").exists()

{others_mark}
def test_of_the_other_tier():
    raise AssertionError
"""
TESTS_OF = {
    "fast": TESTS.format(mark="", others_mark="@pytest.mark.system"),
    "system": TESTS.format(mark="@pytest.mark.system", others_mark=""),
}


def run_tier(tier: str, folder: Path, check: str = "true") -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = system\n nightly\n gpu\naddopts = -p xdist\n", encoding="utf-8"
    )
    (folder / "test_some.py").write_text(TESTS_OF[tier], encoding="utf-8")
    (folder / "Makefile").write_text(f"check:\n\t@{check}\n", encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.tiers", tier]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(), encoding="utf-8"
    )


@pytest.mark.parametrize("tier", ["fast", "system"])
def test_a_test_that_fails_beside_others_and_passes_alone_is_named_as_flaky(
    tier: str, tmp_path: Path
) -> None:
    done = run_tier(tier, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "FLAKY: test_some.py::test_that_fails_beside_others"
    assert "CPU-seconds" in done.stdout.splitlines()[-2]


@pytest.mark.parametrize("tier", ["fast", "system"])
def test_a_test_that_fails_twice_fails_the_tier(tier: str, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    (tmp_path / "seen").touch()
    done = run_tier(tier, tmp_path)
    assert done.returncode == 1
    assert "FLAKY" not in done.stdout


def test_a_failed_check_fails_the_fast_tier(tmp_path: Path) -> None:
    done = run_tier("fast", tmp_path, check="echo not formatted; false")
    assert done.returncode == 2
    assert "not formatted" in done.stdout
    assert done.stdout.splitlines()[-1] == "FLAKY: test_some.py::test_that_fails_beside_others"


def test_code_lines_are_counted_without_blanks_comments_and_docstrings() -> None:
    source = '"""Says what."""\n\n# why\nx = (  # a\n    1,\n)\n"""Of x."""\n'
    assert count_code_lines(source) == 3


def test_a_flaky_test_is_open_until_its_last_column_says_what_mended_it() -> None:
    page = "| date | test | cause | mended by |\n|---|---|---|---|\n"
    page += "| 2026-11-25 | a | unknown | |\n| 2026-11-25 | b | a race | an event |\n"
    assert open_flaky(page) == ["a"]


def test_no_test_begins_after_the_end_that_is_set() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_imports.py"]
    env = os.environ | {"SF_TESTS_END": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patience(), encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^SKIPPED \[\d+\] tests/conftest.py:\d+: not run: SF_TESTS_END", done.stdout, re.M)
    assert not re.search(r"\d passed", done.stdout)
