"""The iterations of the real quickstart: time outside their stages, idle time of the devices, and a device's
hand-over from one tag to the other up to the first work done.

Runs configs/quickstart.yaml like `make run`, with fewer iterations; the first two and the last do not count.
`lent` is the same with `pipeline=multiplexed`: the worker that trains also samples, on the same cores. Only
there is a device handed over. Aims: 0.5 s without a stage at work, 10 % and 20 % idle.

    python -m benchmarks.quickstart
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import typer

from benchmarks.orchestration import run_flow
from sf_core.cli.stack.local import local_stack, start_services
from sf_core.config import RunConfig
from sf_core.config.yaml_file import load_config
from sf_core.reports.summary import orchestration_seconds
from sf_core.reports.view import RunView
from sf_core.scheduling.figures import DeviceFigures, device_figures
from sf_core.scheduling.timeline import read_spans
from storage.run_directory import RunDirectory

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
WARMUP = 2


def main(iterations: int = 23) -> None:
    line = run_quickstart(iterations) | {"lent": run_quickstart(iterations, "multiplexed")}
    print(json.dumps(line))


def run_quickstart(iterations: int, pipeline: str = "") -> dict[str, object]:
    """Figures of the quickstart with this pipeline; empty: the one that the run chooses."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env = {
            "PREFECT_HOME": str(folder / "prefect"),
            "PYTHONPATH": str(Path.cwd()),
            "SF_CACHE_DIR": str(folder / "cache"),
        }
        with local_stack(folder / "logs", env) as stack:
            services = start_services(stack, folder, RunConfig().cluster.workers)()
            places = {
                "run_id": "quickstart",
                "train.iterations": iterations,
                "cluster.scheduler": services.scheduler,
                "dataplane.url": services.dataplane,
                "storage.root": folder,
            }
            if pipeline:
                places["pipeline"] = pipeline
            config = load_config(str(CONFIG), [f"{name}={value}" for name, value in places.items()])
            run_flow(config, folder, {**stack.env, **services.addresses})
        return measure(RunDirectory(config.run_dir))


def measure(run: RunDirectory) -> dict[str, object]:
    """Figures of a run that has ended."""
    spans = read_spans(run)
    # without the last, which has no later batch to sample for
    counted = [iteration for iteration in RunView(run).iterations if iteration.is_complete][WARMUP:-1]
    figures = [device_figures(spans, iteration.window) for iteration in counted]
    without = [orchestration_seconds([iteration]) for iteration in counted]
    seconds = sum(figure.seconds for figure in figures)
    summary = run.read_summary()
    assert summary is not None
    return {
        "iterations": len(counted),
        "seconds_per_iteration": round(seconds / len(counted), 3),
        "seconds_without_a_stage": round(statistics.mean(without), 3),
        "seconds_without_a_stage_median": round(statistics.median(without), 3),
        "idle": {worker: _idle(figures, worker) for worker in figures[0].idle},
        "idle_by_cause_of_the_whole_run": summary["idle_by_cause"],
        "to_train_seconds": _hand_over(figures, "train"),
        "to_rollout_seconds": _hand_over(figures, "rollout"),
        "tokens_per_second": round(sum(i.sampled_tokens for i in counted) / seconds, 1),
        "reward_before": summary["reward_before"],
        "reward_after": summary["reward_after"],
    }


def _idle(figures: list[DeviceFigures], worker: str) -> float:
    """Idle share of the worker over all windows."""
    idle = sum(figure.idle.get(worker, 1.0) * figure.seconds for figure in figures)
    return round(idle / sum(figure.seconds for figure in figures), 3)


def _hand_over(figures: list[DeviceFigures], to: str) -> float | None:
    """Mean seconds of a hand-over; None if no device was handed over."""
    costs = [switch.seconds for figure in figures for switch in figure.switches if switch.to == to]
    known = [cost for cost in costs if cost is not None]
    return round(statistics.mean(known), 3) if known else None


if __name__ == "__main__":
    typer.run(main)
