"""The Pythons that we promise, in every place that names them; the bounds of requirements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests import pythons
from tests.bench.waits import patience

ROOT = Path(__file__).parents[1]
# a Python that says it is of another version, and makes no environments
PRETENDER = """#!/bin/sh
if [ "$1" != -c ]; then echo "asked for $*"; exit 3; fi
exec {python} -c "import sys; sys.version_info = ({version}, 0, 'final', 0); $2"
"""


def pretend(python: Path, version: str) -> None:
    python.parent.mkdir(parents=True, exist_ok=True)
    text = PRETENDER.format(python=sys.executable, version=version.replace(".", ", "))
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)


def set_up(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "setup", *words, f"VENV={folder / 'new'}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=patience(), encoding="utf-8")


def set_up_with(version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    pretend(folder / "python", version)
    return set_up(folder, f"PYTHON={folder / 'python'}")


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
def test_setup_takes_the_pythons_that_the_metadata_names(version: str, tmp_path: Path) -> None:
    major, minor = map(int, version.split("."))
    is_named = major == 3 and minor in pythons.named_pythons()
    assert SpecifierSet(pythons.PROJECT["requires-python"]).contains(version) == is_named
    done = set_up_with(version, tmp_path)
    if is_named:
        assert "asked for -m venv" in done.stdout
    else:
        assert done.stderr.splitlines()[0] == (
            f"{tmp_path / 'python'} is Python {version}: Python 3.11, 3.12 or 3.13 is needed; "
            "name one of them, as in `make setup PYTHON=python3.13`"
        )
        assert not (tmp_path / "new").exists()


def test_an_environment_that_is_there_keeps_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path / "new" / "bin" / "python", "3.12")
    pretend(tmp_path / "path" / "python3", "3.10")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHON", raising=False)
    assert "asked for -m pip install" in set_up(tmp_path).stdout
    assert "asked for -m pip install" in set_up_with("3.12", tmp_path).stdout


def test_setup_does_not_take_an_environment_of_another_python(tmp_path: Path) -> None:
    pretend(tmp_path / "new" / "bin" / "python", "3.12")
    done = set_up_with("3.13", tmp_path)
    assert "asked for" not in done.stdout
    assert done.stderr.splitlines()[0] == (
        f"{tmp_path / 'new'} has another Python than {tmp_path / 'python'}: remove {tmp_path / 'new'}, "
        "or name another folder, as in `make setup VENV=.venvs/new`"
    )


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/start/install.md", "docs/start/quickstart.md", "Makefile"]
)
def test_pages_name_the_same_pythons(page: str) -> None:
    *first, last = (f"3.{minor}" for minor in pythons.named_pythons())
    assert f"Python {', '.join(first)} or {last}" in (ROOT / page).read_text(encoding="utf-8")


def test_a_python_counts_if_it_runs_and_is_of_its_version(tmp_path: Path) -> None:
    here = sys.version_info[1]
    assert pythons.makes_environments(sys.executable, here)
    assert not pythons.makes_environments(sys.executable, here + 1)
    assert not pythons.makes_environments("/bin/false", here)


def test_pythons_of_pyenv_are_found_beside_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tmp_path / "versions" / "3.13.0" / "bin" / "python3.13"
    ours.parent.mkdir(parents=True)
    ours.touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [*pythons.places_of(13)] == [str(ours)]
    assert [*pythons.places_of(12)] == []


def test_a_bound_that_nothing_tests_is_told() -> None:
    pins = "numpy==2.0.0\nruamel-yaml==0.19.1\ncertifi==2023.5.7\nopenai==3.50.0\ntorch==2.13.0\n"
    told = pythons.untested_bounds(
        ["numpy>=2", "ruamel.yaml>=0.19", "certifi", "openai[aiohttp]>=3.50,<4", "torch==2.13.0"], pins
    )
    assert [*told] == [
        "pyproject.toml: nothing tests ruamel.yaml>=0.19; what is tested is ruamel-yaml>=0.19.1",
        "pyproject.toml: nothing tests certifi; what is tested is certifi>=2023.5.7",
    ]
