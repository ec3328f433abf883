"""A run whose directory is in an object store: trained there and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sf_core.cli.stack.command_lock import lock_run
from storage import files
from storage.run_directory import STAGES, RunDirectory
from tests.bench.policy_server import check_printed_use
from tests.bench.stacks import quickstart
from tests.bench.stacks.cluster import Cluster


# tests of storage use a bucket
@pytest.mark.nightly
def test_the_quickstart_runs_in_a_bucket_and_is_read_back_from_it(
    cluster: Cluster, tmp_path: Path, s3_bucket: str
) -> None:
    """A small policy, an iteration of few sessions. Another command uses a local run of the same name."""
    settings = quickstart.options(
        run_id="small",
        storage__root=f"{s3_bucket}/runs",
        policy__hidden_size=32,
        policy__num_layers=1,
        policy__warmstart__steps=5,
        rollout__group_size=2,
        rollout__groups_per_batch=4,
        train__iterations=1,
        evaluate__num_tasks=4,
    )
    of_same_name = tmp_path / "runs" / "small"
    of_same_name.mkdir(parents=True)
    with lock_run(RunDirectory(str(of_same_name))):
        done = quickstart.sf(tmp_path, "train", quickstart.CONFIG, *settings, on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [file.name for file in of_same_name.iterdir()] == ["command.lock"]

    run = RunDirectory(f"{s3_bucket}/runs/small")
    logs = Path(done.stdout.partition(f"run small in {run.uri}, logs in ")[2].partition("\n")[0])
    assert logs.parent.parent == tmp_path / "runs"
    assert "version 0 is ready" in (logs / "flow-train.log").read_text(encoding="utf-8")
    check_printed_use(done.stdout, tmp_path / "served")
    for stage in STAGES:
        manifest = run.read_manifest(0, stage)
        assert manifest is not None
        run.verify(manifest)
    assert json.loads(files.read_bytes(run.path("summary.json")))["iterations"] == 1
    assert files.exists(run.policy_dir + "/model.safetensors")
    assert files.exists(run.events_file("train", 0))

    shown = quickstart.read("inspect", run.uri)
    assert "run small" in shown and "RFTP" in shown.replace(" ", "")
    session = shown.rsplit("--session ", 1)[1].split()[0]
    assert "«sampled, trained»" in quickstart.read("inspect", run.uri, "--session", session)
    quickstart.read("report", run.uri, "-o", str(tmp_path / "small.html"))
    assert "run small" in (tmp_path / "small.html").read_text(encoding="utf-8")
