"""The real run of the fast tier: `sf train` with every process that it starts, the built-in engine and
trainer on an untrained policy, and one kill. The folder of the user has names of ours."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import yaml

from sf_core.config.yaml_file import load_config
from sf_core.process.import_path import python_module
from tests import bench
from tests.bench import waits
from tests.bench.stacks import invariants

RUN = {
    "run_id": "first",
    "policy": {"hidden_size": 32, "num_layers": 1, "warmstart": None},
    "environment": {part: f"mine:{part}" for part in ("tasks", "agent", "reward")},
    "rollout": {"group_size": 4, "groups_per_batch": 4, "max_tokens": 12, "concurrency": 16},
    "train": {"iterations": 2},
    "engine": {"max_running": 16, "context_length": 128},
}


def kill_dataplane(command: int) -> None:
    """kill -9 of the data plane that a command started."""
    for child in psutil.Process(command).children(recursive=True):
        if "dataplane" in child.cmdline():
            return child.kill()
    raise LookupError("the command has no data plane")


def test_a_run_of_two_iterations_trains_although_its_data_plane_is_killed(tmp_path: Path) -> None:
    bench.namesakes.make_namesakes(tmp_path)
    (tmp_path / "mine.py").write_text("from tests.varied_package import *\n", encoding="utf-8")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN | {"storage": {"root": str(tmp_path / "runs")}}), encoding="utf-8")
    config = load_config(file)
    home = bench.stacks.prefect_home.make_prefect_home(tmp_path / "prefect")
    env = os.environ | {"PREFECT_HOME": home, "PYTHONPATH": str(bench.ROOT)}
    env.pop("PREFECT_API_URL", None)
    command = python_module("sf_core", "train", str(file))
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    ) as process:
        waits.wait_until(
            lambda: bench.stacks.cluster.is_committed(config, 0, "rollout") or process.poll() is not None,
            "a batch",
        )
        if process.poll() is None:
            kill_dataplane(process.pid)
        output, _ = process.communicate(timeout=waits.patience())
    assert process.returncode == 0, output
    assert output.startswith(f"note: this folder has a copy of SeamlessFlow, but {bench.ROOT} runs\n")
    invariants.check_result(config)
    assert len(set(invariants.weights(config))) == 2
    bench.snapshot.files.check("run", bench.snapshot.stored_run.describe(config, file, env))
