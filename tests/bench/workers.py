"""A scheduler and workers as real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
from distributed import Client

from sf_core.cli.stack.local import start_dask
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import Process, Supervisor
from sf_core.scheduling.cluster import read_workers
from sf_core.scheduling.plan import Worker
from tests.bench.stacks.nannies import worker_of
from tests.bench.waits import wait_until


class WorkerBench:
    """A scheduler, and workers that the test starts."""

    def __init__(self, stack: Supervisor, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.scheduler = start_dask(self.stack, {}, folder)()

    def sf_worker(self, name: str, *arguments: str, **env: str) -> Process:
        command = [sys.executable, "-m", "sf_core", "worker", "--scheduler", self.scheduler]
        return self._start(name, [*command, "--name", name, *arguments], env)

    def dask_worker(self, name: str, *arguments: str) -> Process:
        command = [sys.executable, "-m", "dask", "worker", self.scheduler, "--no-dashboard", *arguments]
        return self._start(name, command, {})

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> Process:
        [process] = self.stack.start(Part(name, command, env, once=True))
        return process

    def await_worker(self, process: Process) -> Worker:
        def look() -> Worker | None:
            assert process.code() is None, process.tail()
            return next((w for w in read_workers(self.scheduler) if w.name == process.name), None)

        found = wait_until(look, f"worker {process.name}", every_s=0.2)
        assert isinstance(found, Worker)
        return found

    def end(self, *processes: Process) -> None:
        for process in processes:
            self.stack.remove(process)


def tasks_process(process: Process) -> psutil.Process:
    """The process that runs the tasks."""
    found = worker_of(process.pid())
    assert found is not None
    return found


def running_tasks(client: Client) -> list[str]:
    active = client.run(lambda dask_worker: list(dask_worker.active_threads.values()))
    return [key for keys in active.values() for key in keys]
