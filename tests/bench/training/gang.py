"""Ranks of a gang as real processes: each runs a function in its seat and reports the result."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from sf_core.training.gang import RankAssignment, join_gang
from sf_core.training.torch.ranks import Ranks, Rendezvous
from storage.gangs import GangFiles
from storage.run_directory import RunDirectory
from tests.bench.waits import patience, wait_until

_SPAWN = multiprocessing.get_context("forkserver")
# what ranks import, so that each does not, in CPU time; frozen last
_SPAWN.set_forkserver_preload(
    [
        "tests.bench.training.gang",
        "tests.bench.training.model_contract",
        "sf_core.training.torch.torch_model",
        "sf_core.training.torch.trainer",
        "sf_core.training.megatron.backend",
        "sf_core.training.warmstart",
        "sf_core.stages.start",
        "pandas",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "qwen2", "qwen3")),
        "sf_core.scheduling.template.frozen",
    ]
)


@dataclass(frozen=True)
class Try:
    """One try at a train stage: its run and workers, and how long ranks wait."""

    run: str
    workers: tuple[str, ...]
    step_attempt: int = 0
    iteration: int = 0
    timeout_s: float = 30.0
    host: str = "127.0.0.1"
    """Address of all workers."""

    @property
    def files(self) -> GangFiles:
        return GangFiles(RunDirectory(self.run), self.iteration, attempt=1, step_attempt=self.step_attempt)

    def assignment(self, rank: int) -> RankAssignment:
        return RankAssignment(self.workers, rank, self.step_attempt)


Work = Callable[[Ranks], Any]


@dataclass
class Member:
    """A worker's process, which may take several seats one after the other."""

    worker: str
    _orders: Any = field(default_factory=_SPAWN.Queue)
    _reports: Any = field(default_factory=_SPAWN.Queue)

    def __post_init__(self) -> None:
        self._process = _SPAWN.Process(target=_serve, args=(self._orders, self._reports), daemon=True)
        self._process.start()

    def sit(self, one: Try, work: Work) -> None:
        self._orders.put((one, one.workers.index(self.worker), work))

    def report(self, timeout_s: float = 60.0) -> Any:
        """Result of the work, or the error as 'class: text'."""
        try:
            return self._reports.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.worker} reported nothing for {timeout_s:g} s") from None

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def await_stop(self) -> None:
        """Wait until the process has stopped itself during its work."""
        wait_until(lambda: psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED, "a stop")

    def await_death(self) -> None:
        """Wait until the process has killed itself during its work."""
        self._process.join(patience())
        assert self._process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(orders: Any, reports: Any) -> None:
    torch.set_num_threads(1)
    rendezvous = Rendezvous()
    while True:
        one, rank, work = orders.get()
        try:
            with join_gang(
                rendezvous.meet, one.files, one.assignment(rank), one.host, one.timeout_s
            ) as ranks:
                result = work(ranks)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        reports.put(result)
