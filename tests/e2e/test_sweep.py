"""Sweeps on real stacks: killed and continued, with a run that fails, and two runs at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from sf_core.scheduling.timeline import read_spans
from storage.run_directory import RunDirectory
from tests import bench
from tests.bench import runs
from tests.bench.stacks.quickstart import sf

SWEEP = ("sweep", "small.yaml", "--seeds", "2", "--set", "train.learning_rate=1e-3,fast,1e-2")
RUNS = [f"small-lr-lr{rate}-seed{seed}" for seed in range(2) for rate in ("1e-3", "1e-2")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small = bench.stacks.cluster.SMALL_RUN | {"train": {"iterations": 1}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
    return tmp_path


def run_in(folder: Path, name: str) -> RunDirectory:
    return RunDirectory(str(folder / "runs" / name))


def attempts(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"runs/{name}/attempts/*")))


def in_prefect(
    cluster: bench.stacks.cluster.Cluster, sweep: str
) -> tuple[list[FlowRun], list[FlowRun], list[Artifact]]:
    """The flow runs of the sweep, newest first, and the children and artifacts of the newest."""
    with (
        temporary_settings({PREFECT_API_URL: cluster.services.api}),
        get_client(sync_client=True) as client,
    ):
        named = FlowRunFilter.model_validate({"name": {"any_": [f"sweep-{sweep}"]}})
        flows = sorted(
            client.read_flow_runs(flow_run_filter=named), key=lambda run: run.created, reverse=True
        )
        below = {"parent_flow_run_id": {"any_": [flows[0].id]}}
        children = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(below))
        mine = FlowRunFilter.model_validate({"id": {"any_": [flows[0].id]}})
        # Prefect adds one of its own for a flow that failed
        found = [one for one in client.read_artifacts(flow_run_filter=mine) if one.key]
        return flows, children, found


def test_a_sweep_goes_on_after_a_kill_and_after_a_run_that_failed(
    cluster: bench.stacks.cluster.Cluster, folder: Path
) -> None:
    # a run of another sweep has the name of the last run of this one
    taken = run_in(folder, RUNS[-1])
    runs.configure(taken, seed=99)
    runs.commit(taken, 0, "rollout")

    env = os.environ | {"PYTHONPATH": str(bench.ROOT), "COLUMNS": "200"} | cluster.services.addresses
    command = [sys.executable, "-m", "sf_core", *SWEEP]
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said)
    bench.waits.wait_until(
        lambda: attempts(folder, RUNS[1]) or process.poll() is not None, "the second run", every_s=0.1
    )
    assert process.poll() is None, (folder / "said").read_text(encoding="utf-8")
    process.kill()
    process.wait()
    first = run_in(folder, RUNS[0]).read_summary()
    assert first is not None and attempts(folder, RUNS[0]) == 1
    assert not run_in(folder, RUNS[2]).exists()

    done = sf(folder, *SWEEP, on=cluster.services)
    assert done.returncode == 1, done.stdout + done.stderr
    # the finished run is not repeated, the others are finished, and the one that fails says why
    assert run_in(folder, RUNS[0]).read_summary() == first and attempts(folder, RUNS[0]) == 1
    assert "4 runs, 1 of them finished" in done.stdout
    assert f"{RUNS[1]} is finished: held-out 0." in done.stdout
    failure = (
        f"ValueError: run {RUNS[-1]} was started with seed 99, not 1; choose another run_id, or leave "
        "seed out"
    )
    assert f"{RUNS[-1]} failed after 0 of 1 iterations: {failure}; log: " in done.stdout
    assert "train.learning_rate=fast has no runs: --set train.learning_rate: " in done.stdout
    assert (
        "error: 3 of 4 runs are finished, 1 failed, 1 setting was refused; continue with `sf sweep --resume "
        "small-lr`; log: "
    ) in done.stderr
    rows = [
        re.split(r"  +", line.strip())[:2] for line in done.stdout.splitlines() if line.startswith("train.")
    ]
    assert rows[:3] == [
        ["train.learning_rate=1e-3", "2 of 2"],
        ["train.learning_rate=fast", "0 of 0"],
        ["train.learning_rate=1e-2", "1 of 2"],
    ]
    flows, children, [artifact] = in_prefect(cluster, "small-lr")
    assert flows[0].state_name == "Failed"
    assert sorted((child.name, child.state_name) for child in children) == [
        (RUNS[1], "Completed"),
        (RUNS[3], "Failed"),
        (RUNS[2], "Completed"),
    ]
    assert (artifact.key, artifact.type) == ("sweep", "markdown")
    page = str(artifact.data)
    assert "| `train.learning_rate=1e-3` | 2 of 2 | 0." in page and "](data:image/png;base64," in page
    assert "seed 99, not 1" in page

    (folder / "runs" / RUNS[-1] / "config.json").unlink()
    (folder / "runs" / RUNS[-1] / "manifests" / "00000" / "rollout.json").unlink()
    done = sf(folder, "sweep", "--resume", "small-lr", on=cluster.services)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [attempts(folder, name) for name in RUNS] == [1, 2, 1, 1]
    shown = sf(folder, "sweep", "--show", "small-lr", "--json")
    found = json.loads(shown.stdout)
    assert [len(setting["runs"]) for setting in found["settings"]] == [2, 0, 2]
    assert all(run["state"] == "finished" for setting in found["settings"] for run in setting["runs"])
    assert found["settings"][0]["seconds"]["seeds"] == 2
    assert (folder / "runs" / "sweeps" / "small-lr" / "summary.png").read_bytes().startswith(b"\x89PNG")

    # nothing is left, so nothing is started
    again = sf(folder, *SWEEP)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("sweep small-lr: all 4 runs are finished")


# `make test` holds that shares are apart and enough: tests/sf_core/stages/sweeps/test_shares.py
@pytest.mark.nightly
def test_two_runs_at_once_share_no_worker(folder: Path) -> None:
    done = sf(folder, "sweep", "small.yaml", "--seeds", "2", "--at-once", "2", quiet_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs at a time, on a0-0, c0-0, r0-0, t0-0; a0-1, c0-1, r0-1, t0-1" in done.stdout
    used = [
        {span.worker for span in read_spans(run_in(folder, f"small-seeds-seed{seed}"))} for seed in range(2)
    ]
    assert all(used) and used[0].isdisjoint(used[1])
    begun, ended = (
        [run_in(folder, f"small-seeds-seed{seed}").read_committed(0, stage).data[time] for seed in range(2)]
        for stage, time in (("rollout", "started_at"), ("publish", "finished_at"))
    )
    assert max(begun) < min(ended)
