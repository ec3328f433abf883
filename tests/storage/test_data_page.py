"""docs/data.md says what is true: its tables name every column, and its code runs."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from storage.batches import BATCH_SCHEMA, write_batch
from storage.manifests import Manifest
from storage.metrics import write_metrics
from storage.parquet import SCHEMA_VERSION
from storage.run_directory import RunDirectory
from storage.schema import SCHEMA, TURN, Trajectory, TurnSpan
from storage.trajectories import read_trajectories, write_trajectories
from storage.weights import save_weights

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def documented(section: str, header: str) -> dict[str, str]:
    """Name -> type of the rows of one table."""
    _, text = PAGE.split(f"\n## {section}\n")
    _, table = text.split(f"| {header} | type | meaning |\n|---|---|---|\n", 1)
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", table.split("\n\n")[0], re.MULTILINE)
    return {
        name: kind
        for names, kinds in rows
        for name, kind in zip(re.findall(r"`(\w+)`", names), [kinds] * 9, strict=False)
    }


def types(schema: pa.Schema) -> dict[str, str]:
    shown = {field.name: str(field.type) for field in schema}
    return {
        name: "list<struct>" if name == "turns" else re.sub(r"<(element|item): ", "<", kind)
        for name, kind in shown.items()
    }


def test_every_column_is_documented_with_its_type_in_its_place() -> None:
    columns = documented("Trajectories", "column")
    assert columns.pop("iteration") == "partition, int"
    assert list(columns.items()) == list(types(SCHEMA).items())


def test_every_column_a_batch_adds_is_documented() -> None:
    added = pa.schema([field for field in BATCH_SCHEMA if field.name not in SCHEMA.names])
    assert documented("Batches", "column") == types(added)


def test_every_field_of_a_turn_is_documented() -> None:
    assert list(documented("Trajectories", "field of a turn")) == [field.name for field in TURN]


def test_the_schema_version_is_documented() -> None:
    assert f"key `seamlessflow.schema`; it is {SCHEMA_VERSION}." in PAGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    run = RunDirectory(str(root / "runs" / "quickstart"))
    for iteration in range(2):
        row = Trajectory(
            policy="policy",
            task_id="t",
            environment="calculator",
            group_id="g0",
            session_id=f"s{iteration}",
            branch_id="0",
            parent_branch_id=None,
            shared_prefix=0,
            token_ids=np.arange(3, dtype=np.int32),
            loss_mask=np.array([False, True, True]),
            logprobs=np.array([np.nan, -1, -2], np.float32),
            policy_versions=np.array([-1, 0, 0], np.int32),
            turns=[TurnSpan("user", 0, 1), TurnSpan("assistant", 1, 3, "stop", "e-r0", 1.0, 1.0, 0)],
            messages="[]",
            reward=1.0,
            reward_parts={"answer": 1.0},
            status="finished",
            interruptions=0,
            started_at=0.0,
            finished_at=1.0,
        )
        ref = write_trajectories(run, iteration, [row], "part")
        run.commit_manifest(
            Manifest(run_id="quickstart", iteration=iteration, stage="rollout", attempt=1, outputs=[ref])
        )
        write_batch(
            run,
            iteration,
            read_trajectories(run.path(ref.uri)),
            advantages=[np.zeros(3)],
            weights=[1.0],
            decisions=["train"],
            part="part",
        )
        write_metrics(run, "train", iteration, [{"loss": 1.0}])
    save_weights(run.policy_dir, {"weight": torch.zeros(2, 3)}, 2)
    return root


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_code_of_the_page_runs(
    folder: Path, snippet: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(compile(snippet, "docs/data.md", "exec"), {})
    assert capsys.readouterr().out
