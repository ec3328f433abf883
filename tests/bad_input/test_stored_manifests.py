"""Manifests that lack a fact, or have another kind of value for it."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from storage.manifests import STAGE_DATA
from storage.run_directory import STAGES, RunDirectory
from tests.bench import commands, runs
from tests.bench.golden import DATA as STORED

REQUIRED = [
    (stage, name)
    for stage in (*STAGES, "evaluate")
    for name, field in STAGE_DATA[stage].model_fields.items()
    if field.is_required()
]
REMEDY = "remove the file to repeat the stage"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of one iteration, which was evaluated."""
    made = RunDirectory(str(tmp_path_factory.mktemp("runs") / "run-1"))
    runs.configure(made)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    runs.sample(made, 0, [runs.conversation(turns)])
    for stage in (*STAGES[1:], "evaluate"):
        runs.commit(made, 0, stage)
    return made


def refuse(run: RunDirectory, command: str, stage: str, name: str, value: Any = None) -> str:
    """What a command says if the manifest has another value for a fact, or lacks it."""
    file = Path(run.manifest_file(0, stage))
    whole = file.read_text(encoding="utf-8")
    manifest = json.loads(whole)
    manifest["data"].pop(name, None)
    if value is not None:
        manifest["data"][name] = value
    file.write_text(json.dumps(manifest), encoding="utf-8")
    try:
        return commands.check_refused(Path(run.uri), [command, run.uri])
    finally:
        file.write_text(whole, encoding="utf-8")


@pytest.mark.parametrize(("stage", "name"), REQUIRED, ids=".".join)
def test_a_fact_that_is_missing_is_named_with_its_file(run: RunDirectory, stage: str, name: str) -> None:
    file = run.manifest_file(0, stage)
    for command in ("inspect", "report"):
        told = f"{file}: manifest cannot be read (data.{name}: Field required); {REMEDY}"
        assert refuse(run, command, stage, name) == " ".join(told.split()) + "\n"


@pytest.mark.parametrize(
    ("stage", "name", "value", "fault"),
    [
        ("rollout", "reward_mean", "0.5", "data.reward_mean: Input should be a valid number"),
        ("rollout", "failures", [], "data.failures: Input should be a valid dictionary"),
        ("rollout", "waits", [{"what": "x"}], "data.waits.0.start: Field required"),
        ("rollout", "judges", {"kind": {"calls": 1}}, "data.judges.kind.tokens: Field required"),
        ("filter", "lags", [1.5], "data.lags.0: Input should be a valid integer"),
        ("train", "teacher_kl", "much", "data.teacher_kl: Input should be a valid number"),
    ],
)
def test_another_kind_of_value_is_named_with_its_file(
    run: RunDirectory, stage: str, name: str, value: object, fault: str
) -> None:
    told = f"{run.manifest_file(0, stage)}: manifest cannot be read ({fault}); {REMEDY}\n"
    assert refuse(run, "inspect", stage, name, value) == told


def test_a_summary_that_lacks_a_figure_is_named(tmp_path: Path) -> None:
    made = RunDirectory(str(tmp_path / "run-1"))
    runs.configure(made, train={"iterations": 1}, storage={"root": str(tmp_path)})
    runs.pretend(made, 1)
    assert commands.sf("resume", made.uri) == (
        1,
        f"run run-1 is already finished; to continue it, raise train.iterations; to start a new run, set "
        f"another run_id error: {made.path('summary.json')}: the field reward_before is missing; remove the "
        "file, and repeat the command to write it again",
    )


def test_manifests_of_earlier_versions_still_load(tmp_path: Path) -> None:
    with tarfile.open(STORED / "runs" / "db999c56.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    for run, first, last in ((STORED / "runs" / "old", 3, 3), (tmp_path / "db999c56", 0, 2)):
        stored = RunDirectory(str(run))
        for number in range(first, last + 1):
            for stage in ("rollout", "train"):
                assert stored.read_committed(number, stage).data["finished_at"] > 0
    assert stored.read_manifest(None, "start") and stored.read_manifest(1, "publish")
