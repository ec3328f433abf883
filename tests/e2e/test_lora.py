"""A run that trains an adapter, on a real stack."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from sf_core.cli.replay import replay
from sf_core.config import PolicyConfig
from sf_core.models.adapter import load_merged
from sf_core.models.builtin import make_policy
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights
from tests.bench.stacks.cluster import Cluster
from tests.bench.waits import wait_until


def test_an_adapter_is_trained_and_sampled_whatever_is_killed_and_each_step_can_be_replayed(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = str(tmp_path / "model")
    make_policy(model, PolicyConfig(hidden_size=64, num_layers=2), seed=0)
    config = cluster.config(
        "lora",
        policy={"model": model, "dtype": "float32"},
        environment={"name": "quickstart", "tasks": None, "agent": None, "reward": None},
        engine={"kind": "torch", "script": None},
        # every token is of the version that is trained
        rollout={"overlap": False},
        train={"iterations": 4, "lora": {"rank": 4}, "learning_rate": 0.01},
    )
    process = cluster.start(config)
    run = RunDirectory(config.run_dir)
    wait_until(lambda: run.read_manifest(1, "train") is not None, "half of the steps")
    cluster.worker_process("t0").kill()
    cluster.finish(config, process)

    steps = [run.read_committed(number, "train").data for number in range(4)]
    differences = [step["engine_difference_mean"] for step in steps if step["engine_difference_tokens"]]
    assert len(differences) == 4 and all(difference < 1e-5 for difference in differences), steps
    versions = [load_weights(run.version_dir(version)) for version in range(5)]
    name = next(name for name in sorted(versions[0]) if "lora_B" in name)
    moved = [float((factors[name] - versions[0][name]).abs().mean()) for factors in versions]
    assert moved[0] == 0 and all(math.isfinite(far) and far > 1e-4 for far in moved[1:])
    made = load_weights(run.start_dir)
    given = load_weights(model)
    assert all(torch.equal(made[name], given[name]) for name in given)
    merged = load_merged(run.start_dir, run.version_dir(4), "float32")
    policy = load_weights(run.policy_dir)
    assert all(torch.equal(policy[name], merged[name]) for name in merged)
    assert replay(run.uri, 3).equal and replay(run.uri, 0).equal
