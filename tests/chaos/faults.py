"""Faults of a run. A fault is over when `inject` returns; the run must then recover by itself."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from tests.chaos.clock import Clock
from tests.chaos.proxy import Mode, Proxy
from tests.chaos.training import Training


class Fault(Protocol):
    @property
    def name(self) -> str: ...

    def inject(self, run: Training, rng: random.Random) -> None: ...


@dataclass(frozen=True)
class Kill:
    """kill -9 of a part with all its processes; its supervisor restarts it. The flow is a part too: the test
    starts it again."""

    part: str

    @property
    def name(self) -> str:
        return f"kill -9 {self.part}"

    def inject(self, run: Training, rng: random.Random) -> None:
        for process in run.processes(self.part):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass(frozen=True)
class KillEngine:
    """kill -9 of the process that serves the engine; its nanny starts another one."""

    worker: str
    name: str = "kill -9 engine"

    def inject(self, run: Training, rng: random.Random) -> None:
        run.worker_process(self.worker).kill()


@dataclass(frozen=True)
class Stop:
    """SIGSTOP of a random part, and SIGCONT after some seconds."""

    parts: tuple[str, ...]
    seconds: float

    @property
    def name(self) -> str:
        return f"SIGSTOP for {self.seconds:g} s"

    def inject(self, run: Training, rng: random.Random) -> None:
        processes = run.processes(rng.choice(self.parts))
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(self.seconds)


@dataclass(frozen=True)
class FullDisk:
    """No byte is free in a file system."""

    folder: Path
    seconds: float
    name: str = "disk full"

    def inject(self, run: Training, rng: random.Random) -> None:
        ballast = self.folder / "ballast"
        until = time.monotonic() + self.seconds
        with open(ballast, "ab", 0) as file:
            while time.monotonic() < until:
                # what others remove meanwhile is taken too
                with suppress(OSError):
                    while file.write(bytes(2**16)):
                        pass
                time.sleep(0.1)
        ballast.unlink()


@dataclass(frozen=True)
class BadStorage:
    """The object store refuses connections, answers nothing, or answers late."""

    proxy: Proxy
    mode: Mode
    seconds: float

    @property
    def name(self) -> str:
        return f"storage {self.mode}"

    def inject(self, run: Training, rng: random.Random) -> None:
        self.proxy.mode = self.mode
        time.sleep(self.seconds)
        self.proxy.mode = "through"


@dataclass(frozen=True)
class ClockJump:
    """The wall clock of all processes goes forward or back, and stays there."""

    clock: Clock
    hours: float

    @property
    def name(self) -> str:
        return f"clock jumps {self.hours:+g} h"

    def inject(self, run: Training, rng: random.Random) -> None:
        self.clock.jump(self.hours)
