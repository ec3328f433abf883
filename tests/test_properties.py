from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.bench.properties import pytest_configure
from tests.bench.waits import patience

ROOT = Path(__file__).parents[1]
PROPERTY = """
from pathlib import Path
from hypothesis import given, strategies as st
from tests.bench.properties import examples

@given(st.lists(st.text() | st.integers() | st.floats(allow_nan=False)))
def test_draws(values):
    with Path("drawn").open("a", encoding="utf-8") as drawn:
        print(ascii(values), file=drawn)

def test_counts():
    Path("examples").write_text(str(examples(30)), encoding="utf-8")
"""
NUMBERS = """
from pathlib import Path
import torch

DRAWN = []

def test_one():
    DRAWN.append(torch.rand(3).tolist())

def test_other():
    assert DRAWN in ([], [torch.rand(3).tolist()])
    Path("drawn").write_text(str(torch.rand(3).tolist()), encoding="utf-8")
"""


def run_pytest(folder: Path, *options: str, **env: str) -> tuple[str, list[str]]:
    """Run the tests of this folder with our examples. Returns what pytest said, and what was drawn."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "drawn").unlink(missing_ok=True)
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SF_EXAMPLES": ""}
    env = os.environ | own | env
    plugins = ["-p", "_hypothesis_pytestplugin", "-p", "tests.bench.properties", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, *options]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(), encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, (folder / "drawn").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The examples that everybody draws."""
    folder = tmp_path_factory.mktemp("same")
    (folder / "test_some.py").write_text(PROPERTY, encoding="utf-8")
    said, drawn = run_pytest(folder, PYTHONHASHSEED="1")
    assert "examples: the same every time" in said
    assert (folder / "examples").read_text(encoding="utf-8") == "10"
    return drawn


def test_examples_are_the_same_whatever_else_is_imported_and_whatever_the_hashes(
    same: list[str], tmp_path: Path
) -> None:
    (tmp_path / "test_some.py").write_text(f"import sf_core.config\n{PROPERTY}", encoding="utf-8")
    assert run_pytest(tmp_path, PYTHONHASHSEED="2", CI="true")[1] == same
    # a failure is not remembered either
    assert not (tmp_path / ".hypothesis" / "examples").exists()


def test_nightly_draws_anew_and_its_seed_draws_the_same_again(same: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(PROPERTY, encoding="utf-8")
    said, drawn = run_pytest(tmp_path, SF_EXAMPLES="all", PYTHONHASHSEED="1", CI="true")
    assert drawn != same and (tmp_path / "examples").read_text(encoding="utf-8") == "30"
    again = re.search(r"drawn anew; again with SF_EXAMPLES=all pytest (--hypothesis-seed=\d+)\n", said)
    assert again
    (tmp_path / "test_some.py").write_text(f"import sf_core.config\n{PROPERTY}", encoding="utf-8")
    assert run_pytest(tmp_path, again[1], SF_EXAMPLES="all", PYTHONHASHSEED="2")[1] == drawn


def test_torch_draws_the_same_numbers_whatever_ran_before(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(NUMBERS, encoding="utf-8")
    _, drawn = run_pytest(tmp_path)
    assert run_pytest(tmp_path, "-k", "other")[1] == drawn


def test_a_seed_that_is_no_number_is_refused() -> None:
    option = argparse.Namespace(hypothesis_seed="x", hypothesis_profile=None)
    with pytest.raises(pytest.UsageError, match=r"^--hypothesis-seed is .x.: use a whole number"):
        pytest_configure(cast(pytest.Config, SimpleNamespace(option=option)))
