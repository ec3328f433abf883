"""Completion of `sf`, by the protocol that a shell speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sf_core.config.yaml_file import builtin_configs
from storage.run_directory import RunDirectory
from tests.bench.forks import run_fork
from tests.bench.runs import configure

ROOT = Path(__file__).parents[4]
PRELOADED = ("sf_core.cli.main",)


def protocol_of(line: str) -> dict[str, str]:
    """Variables with which bash asks for the words that complete this line."""
    number = len(line.split(" ")) - 1
    return {"_SF_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(number)}


def complete(folder: Path, line: str) -> list[str]:
    """What bash is offered for the last word of the line. Checks that nothing goes wrong on the way."""
    done = run_fork(PRELOADED, "sf_core", folder=folder, variables=protocol_of(line))
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_and_options_are_completed(tmp_path: Path) -> None:
    assert complete(tmp_path, "sf re") == ["resume", "report", "replay"]
    assert "--set" in complete(tmp_path, "sf train --")


def test_configurations_are_completed_by_name_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    assert complete(tmp_path, "sf train ") == ["mine.yaml", *builtin_configs()]
    assert complete(tmp_path, "sf train gspo mi") == ["mine.yaml"]
    # the shell itself completes files in other folders
    assert complete(tmp_path, "sf train configs/") == []


def test_settings_are_completed_by_their_whole_path(tmp_path: Path) -> None:
    # the second word keeps the shell from ending the first with a space
    assert complete(tmp_path, "sf train gspo --set train.lear") == [
        "train.learning_rate=",
        "train.learning_rate=VALUE",
    ]
    assert "train.loss.policy.high=" in complete(tmp_path, "sf evaluate mine --set train.loss.")
    assert complete(tmp_path, "sf settings cluster.workers.t0.d") == [
        "cluster.workers.t0.device",
        "cluster.workers.t0.device_kind",
    ]
    assert "train.loss" in complete(tmp_path, "sf settings train.lo")


@pytest.mark.parametrize("command", ["inspect", "serve"])
def test_runs_are_completed_by_name(tmp_path: Path, command: str) -> None:
    configure(RunDirectory(str(tmp_path / "runs" / "first")))
    configure(RunDirectory(str(tmp_path / "runs" / "other")))
    (tmp_path / "runs" / "folder").mkdir()
    assert complete(tmp_path, f"sf {command} f") == ["first"]
    assert complete(tmp_path / "runs", f"sf {command} f") == []


@pytest.mark.parametrize("line", ["sf trian ", "sf --nothing x", "sf train 'a"])
def test_nothing_goes_wrong_with_a_strange_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "flows").mkdir()
    complete(tmp_path, line)


def test_completion_loads_neither_torch_nor_the_storage(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "pyarrow", "prefect", "distributed", "fsspec")
    watched = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print(*[name for name in {heavy} if name in sys.modules]))\n"
        "from sf_core.cli.main import main; main()"
    )
    for line, expected in (
        ("sf train gspo --set train.", "train.learning_rate="),
        ("sf inspect s3://b/x --", "--json"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", watched],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **protocol_of(line)},
            capture_output=True,
            encoding="utf-8",
        )
        offered = done.stdout.split()
        assert (done.stderr, expected in offered, {*heavy} & {*offered}) == ("", True, set()), line


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    undetected = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run_fork(PRELOADED, "sf_core", "--show-completion", shell, variables=undetected)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_SF_COMPLETE=complete_" in done.stdout
