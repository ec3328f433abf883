"""A run on a standing stack whose flow is restarted whenever it fails, with access to its processes."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sf_core.cli.stack.processes import PREFECT_SETTINGS
from sf_core.config import RunConfig
from sf_core.scheduling.worker import DASK_SETTINGS
from storage import files
from tests.bench import ROOT
from tests.bench.stacks.cluster import small_run
from tests.bench.stacks.desk import Desk
from tests.bench.stacks.invariants import Snapshot, manifests
from tests.bench.stacks.nannies import worker_of
from tests.bench.stacks.standing import Stack
from tests.bench.waits import wait_until

RECOVERY_S = 240.0
"""How long stages are awaited after a fault."""
MAX_STARTS = 8
"""Most starts of the flow within one recovery."""


@dataclass
class Training:
    stack: Stack
    config: RunConfig
    starts: int = field(default=0, init=False)
    _flow: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def journal(self) -> Path:
        folder = Path(self.config.run_dir, "journal")
        if not files.is_local(self.config.run_dir):
            folder = self.stack.folder / "dataplane"
        return folder / f"{self.config.run_id}.journal"

    @property
    def has_ended(self) -> bool:
        return self._flow is not None and self._flow.poll() == 0

    def processes(self, part: str) -> list[psutil.Process]:
        """Processes of a part of the stack or of the flow, with their children, as soon as it runs."""
        self.go_on()
        if part == "flow" and self._flow:
            pid = self._flow.pid
        else:
            pid = wait_until(lambda: self.stack.pid(part), f"{part} to run", every_s=0.1)
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]

    def worker_process(self, worker: str) -> psutil.Process:
        """The process that runs the worker's tasks."""

        def found() -> psutil.Process | None:
            return worker_of(self.processes(f"worker-{worker}")[0].pid)

        process: psutil.Process = wait_until(found, f"{worker} to run", every_s=0.1)
        return process

    def go_on(self) -> None:
        """Start the flow unless it is running or has succeeded."""
        if self._flow is not None and self._flow.poll() in (None, 0):
            return
        self.starts += 1
        file = self.stack.folder / f"{self.config.run_id}.json"
        file.write_text(self.config.model_dump_json(), encoding="utf-8")
        environment = self.stack.environment() | self.stack.services.addresses
        with open(self.log, "ab") as log:
            self._flow = subprocess.Popen(
                [sys.executable, "-m", "flows.train", str(file)],
                env=environment | DASK_SETTINGS | PREFECT_SETTINGS,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> Path:
        return self.stack.folder / "logs" / f"{self.config.run_id}.log"

    def await_stages(self, number: int, quiet_s: float = RECOVERY_S) -> None:
        """Return when so many stages are committed, or the run has ended."""
        starts = self.starts

        def reached() -> bool:
            self.go_on()
            assert self.starts - starts <= MAX_STARTS, f"the flow does not come back: {self.tail()}"
            return self.has_ended or len(manifests(self.config)) >= number

        try:
            wait_until(reached, f"{number} stages of {self.config.run_id}", quiet_s=quiet_s, every_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.tail()}") from None

    def await_end(self, quiet_s: float = 600.0) -> None:
        self.await_stages(10**9, quiet_s)

    def snapshot(self) -> Snapshot:
        return Snapshot.take(self.config, self.journal)

    def tail(self) -> str:
        return self.log.read_text(errors="replace", encoding="utf-8")[-3000:]

    def end(self) -> None:
        if self._flow is not None:
            self._flow.kill()
            self._flow.wait()


@dataclass
class ServedTraining(Training):
    """A run of which all groups are those of a product, with callers that rate its answers."""

    def __post_init__(self) -> None:
        folder = self.stack.folder / f"{self.config.run_id}.product"
        folder.mkdir()
        plane = self.stack.services.dataplane
        self.product = Desk(folder, PLANE=plane, RUN=self.config.run_id, NO_PROXY="127.0.0.1")
        self.product.open()

    def end(self) -> None:
        super().end()
        self.product.close()


def runs(
    stack: Stack,
    root: str,
    iterations: int,
    *,
    overlap: bool = True,
    pipeline: str | None = None,
    kind: type[Training] = Training,
    **sections: dict[str, Any],
) -> Iterator[Training]:
    """Endless sequence of small runs, each of `iterations` iterations, with these sections updated."""
    sections = {"train": {"iterations": iterations}, **sections}
    # agents that give up cost no group: without overlap all runs train on the same ones
    usual = {"overlap": overlap, "session_attempts": 100}
    sections["rollout"] = usual | sections.get("rollout", {})
    while True:
        name = f"chaos-{secrets.token_hex(3)}"
        yield kind(stack, small_run(name, root, pipeline, **sections))
