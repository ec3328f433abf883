"""The quickstart with its run directory in an object store: trained, resumed and read back from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import files
from storage.run_directory import STAGES, RunDirectory
from tests.e2e.conftest import ROOT
from tests.s3_server import BUCKET, make_bucket, s3_server

pytestmark = pytest.mark.slow

SMALL = {
    "policy.hidden_size": 32,
    "policy.num_layers": 1,
    "policy.warmstart.steps": 5,
    "rollout.group_size": 2,
    "rollout.groups_per_batch": 4,
    "train.iterations": 2,
    "evaluate.num_tasks": 4,
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        make_bucket(env)
        yield f"s3://{BUCKET}"


def sf(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "SF_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    env.pop("PREFECT_API_URL", None)
    return subprocess.run(
        [sys.executable, "-m", "sf_core", *arguments],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_quickstart_runs_in_a_bucket_and_is_read_back_from_it(tmp_path: Path, bucket: str) -> None:
    settings = SMALL | {"run_id": "small", "storage.root": f"{bucket}/runs"}
    options = [option for key, value in settings.items() for option in ("--set", f"{key}={value}")]
    done = sf(tmp_path, "train", str(ROOT / "configs" / "quickstart.yaml"), *options)
    assert done.returncode == 0, done.stdout + done.stderr

    run = RunDirectory(f"{bucket}/runs/small")
    for iteration in range(2):
        for stage in STAGES:
            manifest = run.read_manifest(iteration, stage)
            assert manifest is not None
            run.verify(manifest)
    assert json.loads(files.read_bytes(run.path("summary.json")))["iterations"] == 2
    assert files.exists(run.policy_dir + "/model.safetensors")

    shown = sf(tmp_path, "inspect", run.uri)
    assert shown.returncode == 0, shown.stderr
    assert "run small" in shown.stdout and "RFTP" in shown.stdout.replace(" ", "")
    session = shown.stdout.rsplit("--session ", 1)[1].split()[0]
    assert "sampled and trained" in sf(tmp_path, "inspect", run.uri, "--session", session).stdout


def test_a_bucket_that_is_missing_is_said_before_anything_starts(tmp_path: Path, bucket: str) -> None:
    config = str(ROOT / "configs" / "quickstart.yaml")
    done = sf(tmp_path, "train", config, "--set", "storage.root=s3://nothing-here/runs")
    assert done.returncode == 2
    assert "s3://nothing-here/runs: there is no such bucket" in done.stderr
