"""The four pipelines on the same devices, prompts and heavy-tailed lengths: tokens/s, idle time and lag.

Half of the emulated devices (H100, a policy of 8.2e9 parameters; benchmarks/emulation/device_model.py) only
roll out, half can train too; colocated pipelines have as many devices that do both. Everything else is real:
Prefect server, Dask workers in processes of their own, data plane, journal. Rollout takes about three
quarters of the device time, as in agentic RL. One JSON line with an object per pipeline.

    python -m benchmarks.pipelines               20 iterations of each: 90 minutes
    python -m benchmarks.pipelines --simulate    the same in the simulator: seconds
    python -m benchmarks.pipelines --devices 64 --iterations 5 --only multiplexed      half an hour
    python -m benchmarks.pipelines --real        torch engine and trainer on two workers, each pinned to a
                                                 core; gateway, agents and Prefect share both
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks.heavy_tailed import LENGTHS, REAL_LENGTHS
from benchmarks.simulation.variants import (
    VARIANTS,
    WARMUP,
    Devices,
    configure,
    figures_of,
    simulate_variant,
)
from sf_core.cli.stack.local import Services, local_stack, start_services
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import Process, Supervisor
from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.validation import validate_config
from sf_core.config.yaml_file import override_config
from sf_core.reports.view import RunView
from sf_core.scheduling.figures import device_figures
from sf_core.scheduling.timeline import read_spans
from storage.run_directory import RunDirectory

PART = "benchmarks.heavy_tailed"
SESSIONS_PER_DEVICE = 64
"""Sessions of a batch, per device."""


def main(
    only: Annotated[list[str] | None, typer.Option(help="pipelines; all by default")] = None,
    iterations: Annotated[int, typer.Option(min=WARMUP + 2)] = 20,
    devices: Annotated[int, typer.Option(min=2)] = 8,
    simulated: Annotated[bool, typer.Option("--simulate", help="nothing real, in seconds")] = False,
    rollout_kind: Annotated[str | None, typer.Option(help="of devices that only roll out: h20")] = None,
    dual_kind: Annotated[str | None, typer.Option(help="of devices that can train: h800")] = None,
    real: Annotated[
        bool, typer.Option("--real", help="nothing emulated, on two devices of one core")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="of what is emulated: emulation.load_bandwidth=5e10")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="folder that keeps the run directories")] = None,
) -> None:
    devices = 2 if real else devices
    names = only or list(VARIANTS)
    cluster = Devices(devices // 2, devices - devices // 2, rollout_kind, dual_kind)
    config = real_config(iterations) if real else emulated_config(devices, iterations, overrides)
    line: dict[str, Any] = {
        "devices": devices,
        "iterations_counted": iterations - WARMUP - 1,
        "in_flight_cap_per_engine": config.engine.max_running,
        "sessions_per_batch": config.rollout.group_size * config.rollout.groups_per_batch,
        "max_lag_allowed": config.rollout.max_lag,
        "kind": "simulated" if simulated else "real" if real else "emulated",
    }
    if not real:
        line["emulation"] = config.emulation.model_dump()
    if simulated:
        for name in names:
            line[name] = asdict(figures_of(simulate_variant(config, VARIANTS[name], cluster, LENGTHS)))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            for is_dual in (False, True):
                chosen = [name for name in names if name.startswith("colocated") == is_dual]
                folder = Path(keep or temporary) / ("dual" if is_dual else "split")
                line |= run_all(folder, chosen, cluster, config) if chosen else {}
    print(json.dumps(line))


DEADLINES = (
    ("rollout", "session_timeout_s"),
    ("train", "gang_timeout_s"),
    ("cluster", "yield_timeout_s"),
)


def base_config(devices: int, iterations: int) -> RunConfig:
    """Configuration with deadlines long enough for weights that take minutes to be stored and loaded."""
    return validate_config(
        {
            "policy": {"hidden_size": 32, "num_layers": 1, "warmstart": None},
            "environment": {part: f"{PART}:{part}" for part in ("tasks", "agent", "reward")},
            "rollout": {
                "group_size": 8,
                "groups_per_batch": SESSIONS_PER_DEVICE * devices // 8,
                "max_tokens": LENGTHS.longest,
                # every session admitted under a lag bound of 1 may run
                "concurrency": 2 * SESSIONS_PER_DEVICE * devices,
                "session_timeout_s": 3600,
                "request_patience_s": 3600,
            },
            "train": {"iterations": iterations, "checkpoint_every": iterations, "gang_timeout_s": 3600},
            "cluster": {"yield_timeout_s": 300},
            "evaluate": {"every": 1_000_000, "num_tasks": 1},
            "engine": {"kind": "emulated", "max_running": 64, "context_length": 8192},
            "emulation": {"utilisation": 0.55},
        }
    )


def emulated_config(devices: int, iterations: int, overrides: list[str] | None = None) -> RunConfig:
    """Configuration slowed down, deadlines included, for fleets that one data plane on two cores could not
    serve: eight devices sample up to 50,000 tokens per second."""
    settings = base_config(devices, iterations).model_dump()
    pace = settings["emulation"]["time_dilation"] = min(1.0, 8 / devices)
    for section, deadline in DEADLINES:
        settings[section][deadline] /= pace
    return override_config(validate_config(settings), overrides, "--set")


def real_config(iterations: int) -> RunConfig:
    """Thirteen million parameters: with fewer, gateway and orchestration, which share the devices' cores,
    take as much of them as the devices do. Two requests at once: reading weights then bounds decoding, as on
    a large device, and training is some 30 % of the device time; with 16 it is the bottleneck, and trainers
    have no time to lend. The learning rate is too small to change the lengths of answers, so that all
    pipelines sample the same work."""
    return validate_config(
        {
            "policy": {"hidden_size": 384, "num_layers": 6, "warmstart": None},
            "environment": {
                "tasks": f"{PART}:real_tasks",
                "agent": f"{PART}:real_agent",
                "reward": f"{PART}:reward",
            },
            "rollout": {
                "group_size": 8,
                "groups_per_batch": 16,
                "max_tokens": REAL_LENGTHS.longest,
                "concurrency": 512,
            },
            "train": {"iterations": iterations, "checkpoint_every": iterations, "learning_rate": 1e-9},
            "evaluate": {"every": 1_000_000, "num_tasks": 1},
            "engine": {"max_running": 2},
        }
    )


def run_all(folder: Path, names: list[str], devices: Devices, config: RunConfig) -> dict[str, Any]:
    """Run one pipeline after the other on one stack."""
    results = {}
    workers = worker_configs(names[0], devices)
    with running_stack(folder, workers, config.emulation.time_dilation) as (stack, services):
        if config.engine.kind == "torch":
            pin([process for process in stack.processes.values() if is_device(process.name, workers)])
        for name in names:
            results[name] = run_one(folder, name, configure(config, VARIANTS[name], devices), stack, services)
            print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    return results


@contextmanager
def running_stack(
    folder: Path, workers: dict[str, WorkerConfig], time_dilation: float
) -> Iterator[tuple[Supervisor, Services]]:
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PYTHONPATH": str(Path.cwd()),
        "SF_EMULATED": "1",
        "SF_BENCHMARK_TIME_DILATION": str(time_dilation),
        "SF_CACHE_DIR": str(folder / "cache"),
    }
    with local_stack(folder / "logs", env) as stack:
        yield stack, start_services(stack, folder, workers)()


def worker_configs(name: str, devices: Devices) -> dict[str, WorkerConfig]:
    workers = devices.workers_of(VARIANTS[name])
    return {
        worker.name: WorkerConfig(
            tags=tuple(sorted(worker.tags)),
            threads=1,
            device_kind=worker.device.kind if worker.device else None,
        )
        for worker in workers
    }


def is_device(process: str, workers: dict[str, WorkerConfig]) -> bool:
    worker = workers.get(process.removeprefix("worker-"))
    return worker is not None and bool({"rollout", "train"} & set(worker.tags))


def pin(devices: list[Process]) -> None:
    """Pin each device's process, with its present and future children, to a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(devices):
        raise SystemExit(
            f"--real needs {len(devices)} cores, one for each device; this machine has {len(cores)}"
        )
    for device, core in zip(devices, cores, strict=False):
        parent = psutil.Process(device.pid())
        for process in (parent, *parent.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def run_one(
    folder: Path, name: str, config: RunConfig, stack: Supervisor, services: Services
) -> dict[str, Any]:
    settings = config.model_dump() | {
        "run_id": name.replace("_", "-"),
        "cluster": {"scheduler": services.scheduler},
        "dataplane": {"url": services.dataplane},
        "storage": {"root": str(folder / "runs")},
    }
    run = validate_config(settings)
    (folder / f"{name}.json").write_text(run.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "flows.train", str(folder / f"{name}.json")]
    [flow] = stack.start(Part(f"flow-{name}", command, {"PREFECT_API_URL": services.api}, once=True))
    if flow.wait(7200) != 0:
        raise SystemExit(f"{name} failed: {flow.tail(20)}")
    return figures(RunDirectory(run.run_dir))


def figures(directory: RunDirectory) -> dict[str, Any]:
    """Figures of all devices after the warm-up, without the last iteration, which none overlaps."""
    iterations = RunView(directory).iterations
    counted = list(islice(iterations, WARMUP, len(iterations) - 1))
    window = (counted[0].window[0], counted[-1].window[1])
    rollouts = [iteration.stages["rollout"].data for iteration in counted]
    spans = read_spans(directory)
    found = device_figures(spans, window)
    yields = [1e3 * (s.end - s.start) for s in spans if s.label == "yield" and s.start > window[0]]
    return {
        "tokens_per_second": round(sum(data["sampled_tokens"] for data in rollouts) / found.seconds, 1),
        "seconds_per_iteration": round(found.seconds / len(counted), 3),
        "idle_fraction": round(1.0 - found.utilisation_cluster, 4),
        "max_lag": max(data["max_lag"] for data in rollouts),
        "switches": len(found.switches),
        "yield_ms_p50": round(float(np.percentile(yields, 50)), 1) if yields else None,
        "yield_ms_p99": round(float(np.percentile(yields, 99)), 1) if yields else None,
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
