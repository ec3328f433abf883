"""The warm start of a model: a run of its own, whose last version is version 0 of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sf_core.cli.replay import replay
from sf_core.config import PolicyConfig
from sf_core.models.builtin import make_policy
from sf_core.stages.run import OpenRun, RunRef
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights
from tests.bench.stacks.cluster import Cluster
from tests.bench.waits import wait_until


# kills are in test_resume.py, warm starts in tests/sf_core/stages/test_warmstart.py
@pytest.mark.nightly
def test_a_model_is_warmed_up_whatever_is_killed_and_each_step_can_be_replayed(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = str(tmp_path / "model")
    make_policy(model, PolicyConfig(hidden_size=64, num_layers=2), seed=0)
    policy = {"model": model, "warmstart": {"steps": 40, "batch_size": 8, "learning_rate": 2e-3}}
    config = cluster.config(
        "warmed",
        policy=policy,
        environment={"name": "quickstart", "tasks": None, "agent": None, "reward": None},
        engine={"kind": "torch", "script": None},
        train={"iterations": 1},
    )
    process = cluster.start(config)
    warm = RunDirectory(RunDirectory(config.run_dir).warmstart_dir)
    wait_until(lambda: warm.read_manifest(1, "train") is not None, "half of the warm start")
    cluster.worker_process("t0").kill()
    cluster.finish(config, process)

    run = OpenRun(RunRef(warm.run_id, warm.uri, "", 0))
    assert run.config.train.iterations == 4 and run.config.train.minibatches == 10
    losses = [run.directory.read_committed(number, "train").data["loss"] for number in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1
    made = load_weights(RunDirectory(config.run_dir).start_dir)
    given = load_weights(model)
    last = load_weights(warm.weights_dir(4))
    assert made.keys() == given.keys() and all(torch.equal(made[name], last[name]) for name in made)
    assert not any(torch.equal(made[name], given[name]) for name in made)
    assert warm.list_versions("weights") == [4] and warm.list_versions("checkpoints") == []
    assert replay(warm.uri, 3).equal and replay(warm.uri, 0).equal
    assert "warm start: 40 of 40 steps, loss" in cluster.log(config)
