"""What a teacher costs in a train step: seconds and memory, against a step without one and against one with
the KL reference. Prints one JSON line.

Each arm trains the first stored batch of a finished run of configs/quickstart.yaml again and again, with a
later version of the run as teacher, by one thread on a CPU. A process for each arm and round; arms take
turns. CPU seconds are medians over the steps after the first, which loads the teacher; a ratio is the median
of those to `plain` in the same round.

Predicted before the first run, from a prototype with one thread (plain 0.308 s, KL reference 0.602 s): KL
reference 1.9 of plain, because every row has a gradient then; sampled 2.3, by two more forward passes;
reverse and forward 2.4, by one forward pass of the teacher, its logits twice, and a gradient for every row.
Memory: 4 MB of weights more, and less than 80 MB of what a pass needs.

    python -m benchmarks.teacher_steps runs/teacher
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import torch
import typer

from benchmarks.peers.trl_step import Meter, resident_bytes
from sf_core.config import TrainConfig
from sf_core.config.devices import WorkerDevice
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.stored_steps import read_stored_batch
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import SingleRank
from storage.run_directory import RunDirectory


def main(
    run: Annotated[str, typer.Argument(help="A finished run of configs/quickstart.yaml.")],
    version: Annotated[int, typer.Option(help="That teaches.")] = 40,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=2)] = 6,
) -> None:
    run = os.path.abspath(run)
    arms = make_arms(f"{run}@{version}")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, settings in arms.items():
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as process:
                measured[name].append(process.submit(train_again, run, settings, steps).result())
    plain = measured["plain"]
    line: dict[str, Any] = {"benchmark": "teacher_steps", "threads": 1, "rounds": rounds}
    for name, found in measured.items():
        line[name] = {
            "seconds": round(statistics.median(one["seconds"] for one in found), 3),
            "peak_mb": round(statistics.median(one["peak_mb"] for one in found)),
            "seconds_over_plain": round(
                statistics.median(
                    one["seconds"] / base["seconds"] for one, base in zip(found, plain, strict=True)
                ),
                2,
            ),
        }
    print(json.dumps(line))


def make_arms(teacher: str) -> dict[str, dict[str, Any]]:
    """Settings of `train` for each arm, the baselines first."""
    kinds = ("sampled", "reverse", "forward")
    taught = {
        kind: {"advantage": "none", "teacher": {"model": teacher, "divergence": kind}} for kind in kinds
    }
    return {"plain": {}, "kl-reference": {"loss": {"kl": {"coefficient": 0.001}}}, **taught}


def train_again(uri: str, settings: dict[str, Any], steps: int) -> dict[str, float]:
    """Median CPU seconds of a step, and the peak of memory above a process without a model, in MiB."""
    torch.set_num_threads(1)
    directory = RunDirectory(uri)
    run = OpenRun(RunRef(directory.run_id, uri, dataplane_url="", attempt=0))
    batch = read_stored_batch(run, 0)
    backend = TorchBackend(WorkerDevice())
    loaded = resident_bytes()
    trainer = backend.rebuild_trainer(run, 0, SingleRank(), "cpu")
    own = run.config.train.model_dump(mode="json")
    trainer.config = TrainConfig.model_validate(own | settings)
    meter = Meter(len(batch), loaded)
    seconds = []
    for _ in range(steps):
        meter.begin()
        seconds.append(trainer.step(batch)["cpu_seconds"])
        meter.end()
    return {"seconds": statistics.median(seconds[1:]), "peak_mb": meter.line()["peak_mb"]}


if __name__ == "__main__":
    typer.run(main)
