"""Names that do not exist: what the user may have meant is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.cli.main import app
from storage.run_directory import RunDirectory
from tests.bench.commands import check_refused
from tests.bench.runs import configure


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two runs and a configuration."""
    for name in ("mine", "yours"):
        configure(RunDirectory(str(tmp_path / "runs" / name)))
    (tmp_path / "train.yaml").write_text("train:\n  iteration: 3\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_key_of_a_file(here: Path) -> None:
    said = check_refused(here, ["plan", "train.yaml"])
    assert said.startswith("train.yaml line 2: train.iteration: unknown key; allowed here: ")
    assert said.endswith("; did you mean train.iterations?\n")


@pytest.mark.parametrize(
    "command",
    ["inspect", "resume", "evaluate", "report", "gc", "serve", "export --to trl", "replay --iteration 0"],
)
def test_a_run(here: Path, command: str) -> None:
    name, *options = command.split()
    more = ["out.jsonl"] if name == "export" else []
    said = check_refused(here, [name, "mien", *more, *options])
    assert said == (
        f"runs/mien: no run here (config.json is missing); {here}/runs has the runs mine, yours; "
        "did you mean mine?\n"
    )


@pytest.mark.parametrize("command", ["resume", "evaluate", "inspect", "serve"])
def test_a_configuration_in_place_of_a_run(here: Path, command: str) -> None:
    said = check_refused(here, [command, "train.yaml"])
    assert said.startswith(f"train.yaml is a configuration, not a run; {here}/runs has the runs ")
    assert {*said.rpartition("runs ")[2].strip().split(", ")} == {"mine", "yours"}


def test_a_folder_without_runs_is_named(here: Path) -> None:
    said = check_refused(here, ["inspect", "elsewhere/mine"])
    assert said == f"elsewhere/mine: no run here (config.json is missing); {here}/elsewhere has no runs\n"


def test_of_many_runs_those_with_similar_names_are_named(here: Path) -> None:
    for number in range(20):
        configure(RunDirectory(str(here / "many" / f"run{number:02}")))
    said = check_refused(here, ["inspect", "many/run-07"])
    assert f"{here}/many has the runs run07, " in said and said.count("run") < 30
    assert ", ...; did you mean run07 or " in said


@pytest.mark.parametrize("command", ["train", "plan", "try", "up"])
@pytest.mark.parametrize("given", ["runs/mine", "mine"])
def test_a_run_in_place_of_a_configuration(here: Path, command: str, given: str) -> None:
    assert check_refused(here, [command, given], command=app) == (
        f"{given} is a run, not a configuration; to continue the run, use `sf resume runs/mine`; "
        "its settings are in runs/mine/config.json\n"
    )
