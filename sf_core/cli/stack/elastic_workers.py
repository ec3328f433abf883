"""Starts and ends worker processes on this machine so that their number follows the queue of a run
(`cluster.elastic`). Owns no leases: the flow finds the workers that have joined, gives them leases, and
retires those that it does not need.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sf_core.cli.stack.local import start_dask_worker
from sf_core.cli.stack.supervisor import Process, Supervisor
from sf_core.config import RunConfig
from sf_core.dataplane.bodies import RunStatus
from sf_core.scheduling.elastic import Elastic
from sf_core.scheduling.plan import Duty, Worker, duty_of


@dataclass
class _Kind:
    configured: list[str]
    elastic: Elastic
    started: dict[str, Process] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return len(self.configured) + len(self.started)


class LocalRunners:
    """Local workers in addition to the configured ones, copies of one of them, as many as are needed."""

    def __init__(self, stack: Supervisor, config: RunConfig, scheduler: str, directory: Path) -> None:
        self._stack, self._workers = stack, config.cluster.workers
        self._scheduler, self._directory = scheduler, directory
        duties = {name: duty_of(Worker(name, frozenset(w.tags)), ()) for name, w in self._workers.items()}
        self._kinds: dict[Duty, _Kind] = {
            duty: _Kind(configured, Elastic(bounds, config.rollout.concurrency))
            for duty, bounds in config.cluster.elastic.items()
            if (configured := [name for name in duties if duties[name] == duty])
        }

    def adapt(self, status: RunStatus) -> None:
        """Start or end workers by the data plane's status of the run; called periodically. Raises StackError
        if a worker cannot be started."""
        for duty, kind in self._kinds.items():
            wanted = kind.elastic.count_wanted(time.monotonic(), status["work"][duty])
            while kind.num_workers < wanted:
                self._start(kind)
            if kind.started and kind.num_workers > wanted:
                self._end_last(kind, status["runners"])

    def _start(self, kind: _Kind) -> None:
        # the flow retires the last one by name first
        original = max(kind.configured)
        name = f"{original}-{len(kind.started) + 1:02}"
        worker = self._workers[original]
        kind.started[name] = start_dask_worker(self._stack, name, worker, self._scheduler, self._directory)

    def _end_last(self, kind: _Kind, runners: Iterable[str]) -> None:
        """End the last started worker, if it runs no agents and scores nothing any more."""
        name = next(reversed(kind.started))
        if not any(runner.startswith(f"{name}:") for runner in runners):
            self._stack.remove(kind.started.pop(name))
