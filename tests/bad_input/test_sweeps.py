"""What `sf sweep` refuses before it starts or stores anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.stages.sweeps.expansion import expand
from sf_core.stages.sweeps.sweep import SweepFolder
from tests.bench import commands

# what is not refused might go on for ever
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "run.yaml").write_text("seed: 3\n", encoding="utf-8")
    return tmp_path


def refuse(folder: Path, *arguments: str) -> str:
    return commands.check_refused(folder, ["sweep", *arguments]).strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [],
            "sf sweep needs one of CONFIG, --resume NAME and --show NAME, to begin, continue or show a sweep",
        ),
        (
            ["run.yaml", "--show", "first"],
            "sf sweep needs one of CONFIG, --resume NAME and --show NAME, not CONFIG and --show NAME",
        ),
        (["run.yaml", "--json"], "--json is an option of --show: add --show NAME, or leave --json out"),
        (
            ["--resume", "first", "--seeds", "5"],
            "--resume first continues the sweep as it is stored: leave --seeds out, or repeat the command "
            "that began the sweep",
        ),
        (
            ["run.yaml", "--set", "train.iterations"],
            "--set train.iterations: expected key.path=value, or key.path=value,value",
        ),
        (
            ["run.yaml", "--set", "seed=1,2"],
            "--set seed: the seeds of a sweep are set by --seeds N; leave --set seed out",
        ),
        (
            ["run.yaml", "--set", "run_id=mine"],
            "--set run_id: the runs of a sweep are named after the sweep; give its name as --name NAME",
        ),
        (
            ["run.yaml", "--set", "cluster.stage_timeout_s=1,2"],
            "--set cluster.stage_timeout_s: all runs of a sweep share one cluster, so give this setting one "
            "value; a value that is a list is written in brackets",
        ),
        (
            ["run.yaml", "--name", "two words"],
            "a run of this sweep would be named two words-seed3, but a name has at most 100 letters, digits, "
            "`.`, `_` and `-`, the first a letter or digit: give the sweep another name with --name NAME",
        ),
        (
            ["run.yaml", "--set", "train.learning_rate=fast,slow"],
            "--set train.learning_rate: input should be a valid number, unable to parse string as a number, "
            "got 'fast'",
        ),
        (
            ["--show", "first"],
            "no sweep first in {folder}/runs; `sf sweep CONFIG --seeds 3` makes one",
        ),
        (
            ["--show", "./run.yaml"],
            "./run.yaml: no sweep here; sweeps are in the folder sweeps beside their runs, for example "
            "runs/sweeps/NAME",
        ),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(folder: Path, arguments: list[str], sentence: str) -> None:
    assert refuse(folder, *arguments) == sentence.format(folder=folder)


def test_a_setting_that_does_not_exist_is_refused_before_anything_starts(folder: Path) -> None:
    told = refuse(folder, "run.yaml", "--set", "train.learning_rat=1e-3,3e-3")
    assert told.startswith("--set train.learning_rat: ") and "learning_rate" in told


def test_another_sweep_of_the_same_name_is_refused(folder: Path) -> None:
    stored = SweepFolder(str(folder / "runs"), "first")
    stored.put(expand(["run.yaml"], ["train.iterations=3", "rollout.group_size=2,4"], 1, "first"))
    base = ["run.yaml", "--name", "first", "--set"]
    assert refuse(folder, *base, "rollout.max_lag=1,2") == (
        "sweep first varies rollout.group_size, not rollout.max_lag: choose another name with --name NAME"
    )
    assert refuse(folder, *base, "rollout.group_size=2,4", "--set", "train.iterations=5") == (
        "sweep first has the run first-group_size2-seed3 with train.iterations 3, not 5: choose another name "
        "with --name NAME, or use the former value"
    )
    (folder / "runs" / "sweeps" / "second").mkdir()
    told = refuse(folder, "--show", "third")
    assert told == f"no sweep third in {folder}/runs; there is first, second"
    (folder / "runs" / "sweeps" / "first" / "sweep.json").write_text("{}", encoding="utf-8")
    told = refuse(folder, "--resume", "first")
    assert told == f"{folder}/runs/sweeps/first/sweep.json: cannot be read: name: Field required"
