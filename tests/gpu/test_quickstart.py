"""A device that samples and trains in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sf_core.process.environment_variables import visible_cuda_devices
from storage.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_quickstart_samples_and_trains_in_turn_on_one_gpu(gpu_policy: str, tmp_path: Path) -> None:
    settings = {
        "run_id": "gpu",
        "storage.root": str(tmp_path),
        "pipeline": "colocated",
        "policy.dtype": "bfloat16",
        "policy.warmstart.steps": "20",
        "train.iterations": "3",
        "evaluate.num_tasks": "8",
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "sf_core", "train", str(ROOT / "configs" / "quickstart.yaml"), *options]
    # the default workers of a machine with one GPU
    one = (visible_cuda_devices() or ["0"])[0]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": one}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(str(tmp_path / "gpu"))
    for iteration in range(3):
        manifest = run.read_manifest(iteration, "train")
        assert manifest is not None and manifest.data["device"] == "cuda"
        assert manifest.data["engine_difference_mean"] < 0.05
