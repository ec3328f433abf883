"""What a worker's process keeps from one task to the next, in one object.

It is a plugin of the Dask worker: preload.py adds it when the worker starts, and Dask tears it down when the
worker ends. Code that runs a stage without Dask makes a WorkerState, and closes it.
"""

from __future__ import annotations

from typing import Any, cast

from distributed import Worker, WorkerPlugin, get_worker

from sf_core.config.addresses import LOOPBACK
from sf_core.config.devices import Device, WorkerDevice
from sf_core.engines.registry import ResidentEngine
from sf_core.scheduling.lending import LendingGate, Switching

PLUGIN = "worker-state"


class WorkerState(WorkerPlugin):
    def __init__(self, name: str, host: str = LOOPBACK, figures: Device | None = None) -> None:
        self.name = name
        self.host = host
        """The worker's name, and the address by which other workers reach it."""
        self.device = WorkerDevice(figures)
        self.engine = ResidentEngine(self.device)
        self.trainer: Any = None
        """The TrainerBackend of the last run that trained here, set by training/backends.py. It keeps the
        trainer and the process group."""
        self._switching: tuple[str, Switching] | None = None
        """URI of the last run here, and its switches."""

    def measure_switches(self, run: str, max_per_minute: int) -> Switching:
        """The switches of the device in the run with this URI, bounded as its last attempt wants it."""
        if self._switching is None or self._switching[0] != run:
            self._switching = run, Switching(LendingGate(max_per_minute))
        self._switching[1].gate.max_switches_per_minute = max_per_minute
        return self._switching[1]

    def teardown(self, worker: Worker) -> None:
        self.close()

    def close(self) -> None:
        """Close what no task uses now; what a task uses ends with the task, or with the process."""
        self.engine.close()
        if self.trainer is not None:
            self.trainer.close()


def current_worker() -> WorkerState:
    """The state of the worker that runs the calling task."""
    return cast(WorkerState, get_worker().plugins[PLUGIN])


def current_epoch() -> int:
    """Number of this start of the calling task. The scheduler counts what it hands to workers, so a later
    start has a higher number than every earlier one, whenever each begins to run."""
    worker = get_worker()
    return int(worker.state.tasks[worker.get_current_task()].run_id)
