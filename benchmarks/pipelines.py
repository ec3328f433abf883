"""The four pipelines on the same devices, prompts and heavy-tailed lengths: tokens/s, idle time and lag.

Eight emulated devices (H100, a policy of 8.2e9 parameters; sf_core/scheduling/device_model.py), everything
else real: Prefect server, Dask workers in processes of their own, data plane, journal. Rollout
takes about three quarters of the device time, as in agentic RL.

    python -m benchmarks.pipelines               the real system, about 25 minutes
    python -m benchmarks.pipelines --simulate    the simulator, seconds
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from sf_core.config import RunConfig, WorkerConfig, validate_config
from sf_core.iterations import iteration_windows, read_iterations
from sf_core.local_stack import Services, local_stack, start_services
from sf_core.scheduling.figures import device_figures
from sf_core.scheduling.timeline import read_spans
from storage.run_directory import RunDirectory

ITERATIONS = 20
WARMUP = 2
"""Iterations that are not counted: the first has no batch to overlap with, nor a measured switch."""

VARIANTS: dict[str, dict[str, Any]] = {
    "colocated": {"pipeline": "colocated", "overlap": True},
    "colocated_drained": {"pipeline": "colocated", "overlap": False},
    "disaggregated": {"pipeline": "disaggregated"},
    "async": {"pipeline": "async"},
    "multiplexed": {"pipeline": "multiplexed"},
}
"""colocated: sessions that a train step cuts go on after it (partial rollout). colocated_drained: every
session ends before the train step, as common frameworks do it."""

DUAL, ROLLOUT = ("rollout", "train"), ("rollout",)


def main(
    only: Annotated[list[str] | None, typer.Option(help="variants; all by default")] = None,
    iterations: int = ITERATIONS,
    devices: int = 8,
    keep: Annotated[str | None, typer.Option(help="folder that keeps the run directories")] = None,
) -> None:
    names = only or list(VARIANTS)
    config = run_config("any", VARIANTS[names[0]], devices, iterations, {})
    line: dict[str, Any] = {
        "devices": devices,
        "iterations": iterations - WARMUP,
        "in_flight_cap_per_engine": config.engine.max_running,
        "time_dilation": config.emulation.time_dilation,
        "max_lag_allowed": config.rollout.max_lag,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(keep or temporary)
        for colocated in (False, True):
            chosen = [name for name in names if name.startswith("colocated") == colocated]
            if chosen:
                line |= run_variants(folder / ("dual" if colocated else "split"), chosen, devices, iterations)
    print(json.dumps(line))


def run_variants(folder: Path, names: list[str], devices: int, iterations: int) -> dict[str, Any]:
    """On one stack, one variant after the other."""
    results = {}
    with running_stack(folder, workers_of(names[0], devices)) as (stack, services):
        for name in names:
            where = {
                "cluster": {"scheduler": services.scheduler},
                "dataplane": {"url": services.dataplane},
                "storage": {"root": str(folder / "runs")},
            }
            config = run_config(name, VARIANTS[name], devices, iterations, where)
            (folder / f"{name}.json").write_text(config.model_dump_json())
            command = [sys.executable, "-m", "flows.train", str(folder / f"{name}.json")]
            flow = stack.start(f"flow-{name}", command, {"PREFECT_API_URL": services.api})
            if flow.popen.wait(3600) != 0:
                raise SystemExit(f"{name} failed: {flow.tail(20)}")
            results[name] = figures(RunDirectory(config.run_dir), iterations)
            print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    return results


@contextmanager
def running_stack(folder: Path, workers: dict[str, WorkerConfig]) -> Iterator[tuple[Any, Services]]:
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PYTHONPATH": str(Path.cwd()),
        "SF_EMULATED": "1",
        "SF_CACHE_DIR": str(folder / "cache"),
    }
    with local_stack(folder / "logs", env) as stack:
        yield stack, start_services(stack, folder, workers)


def workers_of(variant: str, devices: int) -> dict[str, WorkerConfig]:
    """Half of the devices can train and roll out, and half only roll out; colocated: all can do both."""
    num_dual = devices if variant.startswith("colocated") else devices // 2
    workers = {f"t{i}": WorkerConfig(tags=DUAL, threads=1) for i in range(num_dual)}
    workers |= {f"r{i}": WorkerConfig(tags=ROLLOUT, threads=1) for i in range(devices - num_dual)}
    return workers | {
        "a0": WorkerConfig(tags=("agent",), threads=1),
        "c0": WorkerConfig(tags=("cpu",), threads=1),
    }


def run_config(
    name: str, variant: dict[str, Any], devices: int, iterations: int, where: dict[str, Any]
) -> RunConfig:
    num_trainers = devices if variant["pipeline"] == "colocated" else devices // 2
    overlap = {"overlap": variant["overlap"]} if "overlap" in variant else {}
    return validate_config(
        {
            "run_id": name.replace("_", "-"),
            "pipeline": variant["pipeline"],
            "policy": {"hidden_size": 32, "num_layers": 1, "warmstart": None},
            "environment": {part: f"benchmarks.heavy_tailed:{part}" for part in ("tasks", "agent", "reward")},
            "rollout": {
                "group_size": 8,
                "groups_per_batch": 8 * devices,
                "max_tokens": 5000,
                # every admitted session may be running
                "concurrency": 8 * 8 * devices * 2,
                **overlap,
            },
            "train": {"iterations": iterations, "workers": num_trainers, "checkpoint_every": iterations},
            "evaluate": {"every": 1_000_000, "num_tasks": 1},
            "engine": {"kind": "emulated", "max_running": 16, "context_length": 6000},
            "emulation": {"utilisation": 0.55},
            **where,
        }
    )


def figures(directory: RunDirectory, iterations: int) -> dict[str, Any]:
    """Of the iterations after the warm-up but the last one, which no other overlaps, over all devices."""
    counted = list(islice(read_iterations(directory), WARMUP, iterations - 1))
    windows = [window for number, window in iteration_windows(list(read_iterations(directory))).items()]
    window = (windows[WARMUP][0], windows[iterations - 2][1])
    seconds = window[1] - window[0]
    rollouts = [iteration.stages["rollout"].data for iteration in counted]
    spans = read_spans(directory)
    found = device_figures(spans, window)
    yields = [1e3 * (s.end - s.start) for s in spans if s.label == "yield" and s.start > window[0]]
    return {
        "tokens_per_second": round(sum(data["sampled_tokens"] for data in rollouts) / seconds, 1),
        "seconds_per_iteration": round(seconds / len(counted), 3),
        "idle_fraction": round(1.0 - found.utilisation_cluster, 4),
        "max_lag": max(data["max_lag"] for data in rollouts),
        "switches": len(found.switches),
        "yield_ms_p50": round(float(np.percentile(yields, 50)), 1) if yields else None,
        "yield_ms_p99": round(float(np.percentile(yields, 99)), 1) if yields else None,
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
