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

from sf_core.process.child_processes import is_keeper
from tests.bench.chaos.clock import Clock
from tests.bench.chaos.proxy import Mode, Proxy
from tests.bench.chaos.training import RECOVERY_S, ServedTraining, Training
from tests.bench.stacks.phased_package import SCRIPT, working_on
from tests.bench.waits import patience, wait_until


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
class KillProcess:
    """kill -9 of the process of a worker, that of its engine or trainer; its nanny starts another one."""

    worker: str

    @property
    def name(self) -> str:
        return f"kill -9 process of {self.worker}"

    def inject(self, run: Training, rng: random.Random) -> None:
        run.worker_process(self.worker).kill()


@dataclass(frozen=True)
class KillVllm:
    """kill -9 of one of the processes of a worker's vLLM server, and again of one that is starting."""

    worker: str
    word: str
    """In the command of that process and of no other."""
    again_after_s: float | None = None

    @property
    def name(self) -> str:
        return f"kill -9 {self.word}" + (" and of the next" if self.again_after_s else "")

    def inject(self, run: Training, rng: random.Random) -> None:
        self._kill(run)
        if self.again_after_s:
            time.sleep(self.again_after_s)
            self._kill(run)

    def _kill(self, run: Training) -> None:
        def found() -> list[psutil.Process]:
            servers = vllm_processes(run, self.worker)
            if self.word == "keeper":
                return [p for p in servers if is_keeper(p.cmdline())]
            return [p for p in servers if self.word in " ".join(p.cmdline()) and not is_keeper(p.cmdline())]

        for process in wait_until(found, f"{self.word} to run", quiet_s=RECOVERY_S, every_s=0.2):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def vllm_processes(run: Training, worker: str) -> list[psutil.Process]:
    """All processes of a worker's vLLM server, its keeper included."""
    found = []
    for process in run.processes(f"worker-{worker}"):
        with suppress(psutil.NoSuchProcess):
            if "vllm" in " ".join(process.cmdline()).lower():
                found.append(process)
    return found


@dataclass(frozen=True)
class KillInPhase:
    """kill -9 of a worker's process while phased_package.py prepares or scores a session there."""

    phase: str
    folder: Path
    """Where that package tells the phases."""

    @property
    def name(self) -> str:
        return f"kill -9 process while {self.phase}"

    def inject(self, run: Training, rng: random.Random) -> None:
        run.go_on()

        def found() -> psutil.Process | None:
            alive = [pid for pid in working_on(self.phase, self.folder) if psutil.pid_exists(pid)]
            return psutil.Process(alive[0]) if alive else None

        wait_until(found, f"a session that is in phase {self.phase}", quiet_s=RECOVERY_S, every_s=0.02).kill()


@dataclass(frozen=True)
class KillHarness:
    """kill -9 of a command that is the agent of a session, or of the process of its worker; then nothing of
    the command is left."""

    kills_worker: bool

    @property
    def name(self) -> str:
        return "kill -9 process while running" if self.kills_worker else "kill -9 harness"

    def inject(self, run: Training, rng: random.Random) -> None:
        worker = next(name for name, w in run.config.cluster.workers.items() if "agent" in w.tags)

        def found() -> list[psutil.Process]:
            run.go_on()
            children = run.worker_process(worker).children(recursive=True)
            return [child for child in children if SCRIPT in _words(child)]

        harness = wait_until(found, "a harness to run", quiet_s=RECOVERY_S, every_s=0.05)
        if self.kills_worker:
            run.worker_process(worker).kill()
        else:
            harness[-1].kill()
            harness = harness[-1:]
        _, left = psutil.wait_procs(harness, timeout=patience())
        assert not left, f"harnesses that outlive {self.name}: {left}"


@dataclass(frozen=True)
class KillProduct:
    """kill -9 of the product whose sessions train, which is started again."""

    name: str = "kill -9 product"

    def inject(self, run: Training, rng: random.Random) -> None:
        assert isinstance(run, ServedTraining)
        run.product.kill()
        time.sleep(rng.uniform(0, 3))
        run.product.start()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


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
