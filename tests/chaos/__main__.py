"""python -m tests.chaos --seed 0 --rounds 1: every fault in every round, in an order that the seed decides.

Starts a stack of its own (`sf up`) whose clock can jump, with one run directory on a small disk and one in an
object store behind a proxy. Faults that the machine does not allow are left out, with a message.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from sf_core.config import RunConfig
from tests.bench.chaos.clock import Clock
from tests.bench.chaos.faults import (
    BadStorage,
    ClockJump,
    Fault,
    FullDisk,
    Kill,
    KillHarness,
    KillInPhase,
    KillProcess,
    KillProduct,
    Stop,
)
from tests.bench.chaos.proxy import MODES, Proxy
from tests.bench.chaos.runner import Injection, run_through, run_undisturbed, table
from tests.bench.chaos.training import ServedTraining, Training, runs
from tests.bench.s3_server import BUCKET, make_bucket, s3_server
from tests.bench.stacks.phased_package import SCRIPT
from tests.bench.stacks.standing import Stack

PARTS = (
    *("flow", "dask-scheduler", "dataplane", "prefect-server"),
    *(f"worker-{name}" for name in RunConfig().cluster.workers),
)
PHASED: dict[str, dict[str, Any]] = {
    "environment": {
        **{part: f"tests.bench.stacks.phased_package:{part}" for part in ("tasks", "prepare", "reward")},
        "agent": {"command": [sys.executable, "-c", SCRIPT]},
    },
    "rollout": {"concurrency": 2, "prepare_ahead": 2},
}
"""Settings of runs whose sessions last long enough in each phase, with a command as agent."""
SERVED: dict[str, dict[str, Any]] = {
    "environment": {part: f"tests.bench.stacks.desk_package:{part}" for part in ("tasks", "agent", "reward")},
    "rollout": {"outside_groups": 3, "session_timeout_s": 15.0, "reward_patience_s": 15.0},
}
"""Settings of runs that learn from a product alone."""
CHOOSING: dict[str, dict[str, Any]] = {
    "rollout": {
        "gate": "varied",
        "spare_sessions": 1,
        "curriculum": {
            "pool": 100,
            "solved": 0.0,
            "floor": 0.05,
        },
    },
}
"""Settings of runs that choose what they sample and keep."""
ITERATIONS_PER_FAULT = 2
DISK_MB = 256


@dataclass(frozen=True)
class Place:
    """Root of runs, and the faults that they meet there."""

    root: str
    faults: list[Fault]
    overlap: bool
    """`rollout.overlap`; if false, the weights are compared with those of an undisturbed run."""
    kind: type[Training] = Training
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further settings of the runs."""

    @property
    def iterations(self) -> int:
        return 2 + ITERATIONS_PER_FAULT * len(self.faults)


def main() -> None:
    options = _options()
    console = Console()
    rng = random.Random(options.seed)
    done = list[Injection]()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    console.print(f"seed {options.seed}; kept if something is lost: {folder}")
    with _places(folder, options.seconds, options.only, console.print) as (stack, places):
        undisturbed: list[str] = []
        if compared := [place for place in places if not place.overlap and place.faults]:
            longest = max(compared, key=lambda place: place.iterations)
            undisturbed = run_undisturbed(next(runs(stack, longest.root, longest.iterations, overlap=False)))
            console.print(f"undisturbed: {len(undisturbed)} iterations")
        for place in places * options.rounds:
            rng.shuffle(place.faults)
            kind = place.kind
            sections = place.sections
            trainings = runs(
                stack, place.root, place.iterations, overlap=place.overlap, kind=kind, **sections
            )
            expected = None if place.overlap else undisturbed
            done += run_through(trainings, place.faults, rng, console.print, expected)
    console.print(table(done))
    lost = [what for injection in done for what in injection.lost]
    assert not lost, f"lost: {'; '.join(lost)}"
    shutil.rmtree(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=0, help="decides the order and the moments")
    parser.add_argument("--rounds", type=int, default=1, help="every fault once in each")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a fault lasts, if it does last")
    parser.add_argument("--only", default="", help="faults with this in their name")
    return parser.parse_args()


@contextmanager
def _places(
    folder: Path, seconds: float, only: str, tell: Callable[[str], None]
) -> Iterator[tuple[Stack, list[Place]]]:
    """A running stack, and places for runs on a disk and in a bucket. Every kind of fault happens to a run
    without overlap."""
    on_disk = _general_faults(seconds)
    clock = Clock(folder)
    disk = folder / "runs"
    on_disk += [ClockJump(clock, 1), ClockJump(clock, -2)]
    with ExitStack() as exits:
        s3 = exits.enter_context(s3_server())
        os.environ.update(s3)
        make_bucket(s3)
        proxy = Proxy(int(s3["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        of_bucket: list[Fault] = [BadStorage(proxy, mode, seconds) for mode in MODES]
        if exits.enter_context(_small_disk(disk)):
            on_disk.append(FullDisk(disk, seconds / 3))
        else:
            tell("left out: disk full, which needs a file system of its own, and root to mount it")
        phases = folder / "phases"
        phases.mkdir()
        addresses = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "PHASES": str(phases)}
        stack = Stack(folder, env=addresses | clock.env)
        exits.callback(stack.sf, "down")
        started = stack.up()
        assert started.returncode == 0, started.stdout + started.stderr
        bucket = f"s3://{BUCKET}/runs"
        places = [
            Place(str(disk), _named(only, on_disk), overlap=False),
            Place(bucket, _named(only, of_bucket), overlap=False),
            Place(bucket, _named(only, _general_faults(seconds)), overlap=True, sections=CHOOSING),
            Place(str(disk), _named(only, _faults_in_phases(phases)), overlap=True, sections=PHASED),
            Place(
                *(str(disk), _named(only, [KillProduct(), Kill("dataplane"), Kill("flow")])),
                overlap=True,
                kind=ServedTraining,
                sections=SERVED,
            ),
        ]
        yield stack, places


def _named(part: str, faults: list[Fault]) -> list[Fault]:
    return [fault for fault in faults if part in fault.name]


def _general_faults(seconds: float) -> list[Fault]:
    """Faults that can happen to any run."""
    return [*map(Kill, PARTS), KillProcess("r0"), KillProcess("t0"), Stop(PARTS, seconds)]


def _faults_in_phases(folder: Path) -> list[Fault]:
    killed = [KillInPhase(phase, folder) for phase in ("preparing", "scoring")]
    return [*killed, KillHarness(kills_worker=True), KillHarness(kills_worker=False)]


@contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    """A small tmpfs, yields True; if this user cannot mount one, a plain folder, yields False."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


if __name__ == "__main__":
    main()
