"""A version of a run teaches another run, on a real stack."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sf_core.cli.replay import replay
from sf_core.config import PolicyConfig
from sf_core.models.builtin import make_policy
from storage.run_directory import RunDirectory
from tests.bench.stacks.cluster import Cluster
from tests.bench.waits import wait_until

ENVIRONMENT = {"name": "quickstart", "tasks": None, "agent": None, "reward": None}
ENGINE = {"kind": "torch", "script": None}


# kills are in test_resume.py, steps with a teacher in tests/sf_core/training/torch/test_teaching.py
@pytest.mark.nightly
def test_a_version_of_a_run_teaches_another_one_whatever_is_killed_and_each_step_can_be_replayed(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = str(tmp_path / "model")
    make_policy(model, PolicyConfig(hidden_size=64, num_layers=2), seed=0)
    policy = {"model": model, "dtype": "float32"}
    parts: dict[str, Any] = {"policy": policy, "environment": ENVIRONMENT, "engine": ENGINE}
    # what it learns does not matter, as long as it is something
    first = cluster.config("teacher", **parts, train={"iterations": 2, "learning_rate": 0.01})
    cluster.finish(first, cluster.start(first))
    teacher = RunDirectory(first.run_dir)

    train = {
        "iterations": 6,
        "learning_rate": 0.003,
        "advantage": "none",
        "teacher": {"model": f"{teacher.uri}@2"},
    }
    config = cluster.config("pupil", **parts, rollout={"group_size": 1, "groups_per_batch": 24}, train=train)
    process = cluster.start(config)
    run = RunDirectory(config.run_dir)
    wait_until(lambda: run.read_manifest(2, "train") is not None, "half of the steps")
    cluster.worker_process("t0").kill()
    cluster.finish(config, process)

    steps = [run.read_committed(number, "train").data for number in range(6)]
    distances = [step["teacher_kl"] for step in steps]
    assert 0 < distances[-1] < distances[0] / 2, distances
    assert len({step["teacher"] for step in steps}) == 1
    log = cluster.log(config)
    assert "KL to the teacher " in log and "nothing was learned" not in log
    assert replay(run.uri, 5).equal and replay(run.uri, 0).equal
    # another model in the same place is another teacher
    shutil.copy(Path(teacher.weights_dir(1), "model.safetensors"), teacher.weights_dir(2))
    with pytest.raises(ValueError, match=r"teacher@2 is not the model that taught iteration 0"):
        replay(run.uri, 5)
