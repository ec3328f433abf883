"""Seconds per iteration spent in Prefect, Dask and manifests without any work. Baseline, same run and server:
plain Prefect subflows of four no-op tasks. benchmarks/quickstart.py measures iterations with work, and the
hand-over of a device.

    python -m benchmarks.orchestration
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from sf_core.cli.stack.local import Services, local_stack, start_services
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.reports.summary import orchestration_seconds
from sf_core.reports.view import RunView
from sf_core.stages.run import OpenRun, RunRef


def main(iterations: int = 12, warmup: int = 2) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env = {
            "PREFECT_HOME": str(folder / "prefect"),
            "PYTHONPATH": str(Path.cwd()),
            "SF_CACHE_DIR": str(folder / "cache"),
        }
        with local_stack(folder / "logs", env) as stack:
            services = start_services(stack, folder, RunConfig().cluster.workers)()
            env = {**stack.env, "PREFECT_API_URL": services.api}
            baseline = json.loads(
                _python(["-m", "benchmarks.nothing", services.scheduler, str(iterations)], env).splitlines()[
                    -1
                ]
            )
            config = _config(folder, services, iterations)
            run_flow(config, folder, env)
            line = measure(config, warmup)
    line["baseline_plain_prefect_seconds_per_iteration"] = round(statistics.mean(baseline[warmup:]), 3)
    print(json.dumps(line))


def run_flow(config: RunConfig, folder: Path, env: dict[str, str]) -> None:
    """Run the flow to its end."""
    (folder / "flow.json").write_text(config.model_dump_json(), encoding="utf-8")
    _python(["-m", "flows.train", str(folder / "flow.json")], env)


def measure(config: RunConfig, warmup: int) -> dict[str, object]:
    run = OpenRun(RunRef(str(config.run_id), config.run_dir, str(config.dataplane.url), attempt=1))
    iterations = RunView(run.directory, warmup).iterations
    return {
        "orchestration_seconds_per_iteration": round(orchestration_seconds(iterations) / len(iterations), 3),
        "iterations": len(iterations),
    }


def _config(folder: Path, services: Services, iterations: int) -> RunConfig:
    return validate_config(
        {
            "run_id": "nothing",
            "policy": {"hidden_size": 32, "num_layers": 1, "warmstart": None},
            "environment": {part: f"benchmarks.nothing:{part}" for part in ("tasks", "agent", "reward")},
            "rollout": {"group_size": 2, "groups_per_batch": 1, "max_tokens": 4},
            "train": {"iterations": iterations},
            "evaluate": {"every": 1000, "num_tasks": 1},
            "engine": {"kind": "scripted", "script": "benchmarks.nothing:script"},
            "cluster": {"scheduler": services.scheduler},
            "dataplane": {"url": services.dataplane},
            "storage": {"root": str(folder)},
        }
    )


def _python(arguments: list[str], env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{arguments} failed: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    typer.run(main)
