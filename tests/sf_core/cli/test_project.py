"""`sf init`: the project that it writes passes its own tests and is a configuration that can be planned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sf_core.cli.main import app
from sf_core.config.yaml_file import load_config
from tests.bench import ROOT


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(name: str) -> Result:
    return CliRunner().invoke(app, ["init", name])


def test_a_project_passes_its_own_tests_and_names_its_functions(tmp_path: Path) -> None:
    done = init("till-agent")
    assert done.exit_code == 0
    folder = tmp_path / "till-agent"
    names = {"till_agent.py", "train.yaml", "test_till_agent.py", "README.md"}
    assert {path.name for path in folder.iterdir()} == names
    assert done.output.splitlines()[-1] == "cd till-agent && sf try train.yaml && sf train train.yaml"
    environment = load_config(folder / "train.yaml").environment
    assert (environment.agent, environment.reward) == ("till_agent:agent", "till_agent:reward")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    tested = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        encoding="utf-8",
    )
    assert tested.returncode == 0, tested.stdout
    assert "6 passed" in tested.stdout


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("2nd", "2nd: '2nd' cannot be the name of a Python module"),
        ("class", "'class' cannot be the name of"),
        ("my agent", "'my agent' cannot be the name of"),
        ("json", "json: the module name json is already used by "),
        ("there", "there already exists; choose another name or remove it"),
    ],
)
def test_a_name_that_cannot_be_taken_leaves_nothing(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = init(name)
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_takes_no_more_leaves_nothing_half_written(tmp_path: Path) -> None:
    # no file may grow: what a full disk does, for one process
    script = 'ulimit -f 0; exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "sf_core", "init", "shop"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "error: shop cannot be written: File too large"
    assert list(tmp_path.iterdir()) == []
