"""Starts of a `train` worker: from a template, as in our stacks, and by `spawn`, Dask's default, which is the
baseline. Measures the first start and those after kill -9 of the worker's process: seconds to the end of the
first task, and CPU-seconds; then the memory of the worker with its nanny. The methods take turns in one run.

    python -m benchmarks.worker_starts
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import typer
from distributed import Client

from sf_core.cli.stack.local import local_stack, start_dask
from sf_core.cli.stack.processes import dask_worker
from sf_core.cli.stack.supervisor import Process, Supervisor
from sf_core.config import WorkerConfig

METHODS = ("spawn", "template")
TIMEOUT_S = 300


def main(rounds: int = 3, kills: int = 3) -> None:
    found: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with local_stack(folder / "logs", {"PYTHONPATH": str(Path.cwd())}) as stack:
            scheduler = start_dask(stack, {}, folder)()
            with Client(scheduler, set_as_default=False) as client:
                for _ in range(rounds):
                    for method in METHODS:
                        found[method].append(measure(method, stack, client, folder, kills))
    line = {f"{method}_{name}": value for method in METHODS for name, value in medians(found[method]).items()}
    print(json.dumps({"rounds": rounds, "kills": rounds * kills} | line))


def measure(method: str, stack: Supervisor, client: Client, folder: Path, kills: int) -> dict[str, float]:
    address = client.scheduler.address
    part = dask_worker(method, WorkerConfig(tags=("train",), threads=1), [address], folder)
    if method == "spawn":
        place = part.command.index("--preload-nanny")
        part = replace(part, command=part.command[:place] + part.command[place + 2 :])
    began = time.perf_counter()
    [process] = stack.start(part)
    pid = first_task(client, method)
    facts = {"first_start_s": time.perf_counter() - began, "first_start_cpu_s": cpu_seconds(process)}
    restarts = []
    costs = []
    for _ in range(kills):
        before = cpu_seconds(process)
        psutil.Process(pid).kill()
        began = time.perf_counter()
        pid = first_task(client, method)
        restarts.append(time.perf_counter() - began)
        costs.append(cpu_seconds(process) - before)
    facts |= {"restart_s": statistics.median(restarts), "restart_cpu_s": statistics.median(costs)}
    memory = [one.memory_full_info() for one in family(process)]
    facts["rss_mb"] = sum(one.rss for one in memory) / 2**20
    facts["pss_mb"] = sum(one.pss for one in memory) / 2**20
    stack.remove(process)
    return facts


def first_task(client: Client, worker: str) -> int:
    """Run a task that needs what stages need; returns the id of the process that ran it."""

    def task() -> int:
        import torch

        import tasks.lease
        import tasks.stages

        assert torch.ones(2).sum() == 2 and tasks.stages.train and tasks.lease.lease
        return os.getpid()

    return int(client.submit(task, resources={f"@{worker}": 1}, pure=False).result(timeout=TIMEOUT_S))


def family(process: Process) -> list[psutil.Process]:
    nanny = psutil.Process(process.pid())
    return [nanny, *nanny.children(recursive=True)]


def cpu_seconds(process: Process) -> float:
    """CPU time of the nanny and of every process that it started, ended ones included."""
    return sum(sum(one.cpu_times()[:4]) for one in family(process))


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}


if __name__ == "__main__":
    typer.run(main)
