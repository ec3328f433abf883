"""A run whose policy is shown images, on a real stack with vLLM: nothing is lost to what is killed, and a
wrong image ends the run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from sf_core.cli.replay import replay
from sf_core.config import PolicyConfig, RunConfig
from sf_core.models.builtin import make_policy
from sf_core.process.environment_variables import vllm_python
from storage.run_directory import RunDirectory
from tests.bench import stacks, waits
from tests.bench.stacks import invariants

SEES: dict[str, Any] = {
    # vLLM's CPU build knows no narrower heads
    "policy": {"sees": True, "hidden_size": 64, "num_layers": 1, "warmstart": None},
    "environment": {"name": "screen", "tasks": None, "agent": None, "reward": None},
    "engine": {"kind": "vllm", "script": None},
}


def configure(cluster: stacks.cluster.Cluster, run_id: str, **train: Any) -> RunConfig:
    rollout = {"overlap": False, "max_tokens": 8}
    return cluster.config(run_id, **SEES, rollout=rollout, train=train)


def kill_vllm(cluster: stacks.cluster.Cluster) -> None:
    """kill -9 of the process that computes."""
    engines = [
        process
        for worker in cluster.stack.processes
        if worker.startswith("worker-")
        for process in psutil.Process(cluster.stack.processes[worker].pid()).children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    ]
    assert engines
    for process in engines:
        process.kill()


def is_healthy(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=30).status_code == 200


def make_large(folder: str) -> None:
    """A policy with large weights, so that images matter."""
    make_policy(folder, PolicyConfig(sees=True, hidden_size=64, num_layers=1), seed=0)
    weights = load_file(f"{folder}/model.safetensors")
    large = {name: tensor * 3 if tensor.dim() > 1 else tensor for name, tensor in weights.items()}
    save_file(large, f"{folder}/model.safetensors")


def shown(config: RunConfig) -> list[dict[str, Any]]:
    """The spans of all images in the trajectories that trained."""
    rows = [
        row for k in range(config.train.iterations) for row in invariants.trajectories(config, k).to_pylist()
    ]
    return [span for row in rows for span in row["images"]]


# kills are in test_resume.py, runs that see in tests/sf_core/stages/test_multimodal_runs.py
@pytest.mark.nightly
def test_a_run_that_sees_loses_nothing_whatever_is_killed_and_each_step_can_be_replayed(
    cluster: stacks.cluster.Cluster,
) -> None:
    vllm_python()
    config = configure(cluster, "sees", iterations=5)
    process = cluster.start(config)
    run = RunDirectory(config.run_dir)

    def reach(iteration: int) -> None:
        waits.wait_until(
            lambda: stacks.cluster.is_committed(config, iteration, "rollout"),
            f"batch {iteration}",
            quiet_s=240,
        )

    reach(0)
    cluster.restart_dataplane()
    reach(1)
    kill_vllm(cluster)
    reach(2)
    cluster.worker_process("t0").kill()
    reach(3)
    process.kill()
    process.wait()
    cluster.finish(config, cluster.start(config))

    invariants.check_result(config)
    spans = shown(config)
    assert spans
    files = {file.name: file for file in Path(run.media_dir).iterdir()}
    assert {f"{span['sha256']}.png" for span in spans} <= files.keys()
    for name, file in files.items():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == name.removesuffix(".png")
    steps = [run.read_committed(number, "train").data for number in range(5)]
    differences = [step["engine_difference_mean"] for step in steps if step["engine_difference_tokens"]]
    assert differences and all(difference < 1e-5 for difference in differences), steps
    assert replay(run.uri, 4).equal and replay(run.uri, 0).equal


# a server that sees is in tests/sf_core/engines/vllm/test_multimodal.py
@pytest.mark.nightly
def test_a_run_whose_engine_sees_otherwise_than_its_trainer_ends_at_the_first_batch(
    cluster: stacks.cluster.Cluster, tmp_path: Path
) -> None:
    vllm_python()
    start = str(tmp_path / "policy")
    make_large(start)
    arguments = ['--hf-overrides={"vision_config": {"hidden_act": "gelu"}}']
    engine = {"kind": "vllm", "script": None, "context_length": 1024, "vllm": {"arguments": arguments}}
    parts = SEES | {"engine": engine, "policy": {"model": start, "dtype": "float32"}}
    # a server that computes as the trainer does differs by less than 1e-5
    train = {"iterations": 3, "max_engine_difference": 1e-3}
    # the difference of fewer tokens says nothing
    rollout = {"group_size": 8, "groups_per_batch": 8, "max_tokens": 8}
    config = cluster.config("swapped", "async", **parts, rollout=rollout, train=train)
    process = cluster.start(config)
    assert process.wait(waits.patience(240)) != 0
    told = cluster.log(config)
    assert "max_engine_difference" in told, told[-3000:]
    assert not stacks.cluster.is_committed(config, 1, "train")
