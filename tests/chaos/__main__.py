"""python -m tests.chaos --seed 0 --rounds 1: every fault in every round, in an order that the seed decides.

Starts a stack of its own (`sf up`) whose clock can jump, with one run directory on a small disk and one in an
object store behind a proxy. What the machine does not allow is left out, and said.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from sf_core.config import RunConfig
from tests.chaos.clock import Clock
from tests.chaos.faults import BadStorage, ClockJump, Fault, FullDisk, Kill, KillEngine, Stop
from tests.chaos.proxy import Proxy
from tests.chaos.runner import Injection, run_through, table
from tests.chaos.training import Training
from tests.e2e.conftest import small_run
from tests.e2e.standing import Stack
from tests.s3_server import BUCKET, make_bucket, s3_server

WORKERS = tuple(f"worker-{name}" for name in RunConfig().cluster.workers)
PARTS = ("flow", "dask-scheduler", "dataplane", "prefect-server", *WORKERS)
ITERATIONS_PER_FAULT = 2
DISK_MB = 64


def general_faults(seconds: float) -> list[Fault]:
    """Those that any run may meet."""
    return [*map(Kill, PARTS), KillEngine("r0"), Stop(PARTS, seconds)]


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """False if this user may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="that a fault lasts, if it does last")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    options = parser.parse_args()
    console, rng, done = Console(), random.Random(options.seed), list[Injection]()
    numbers = itertools.count(1)
    with ExitStack() as exits:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        s3 = exits.enter_context(s3_server())
        os.environ.update(s3)
        make_bucket(s3)
        proxy = Proxy(int(s3["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        clock = Clock(folder)
        stack = Stack(folder, env={"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", **clock.env})
        has_small_disk = exits.enter_context(small_disk(folder / "runs"))
        exits.callback(stack.sf, "down")
        started = stack.up()
        assert started.returncode == 0, started.stdout + started.stderr

        seconds = options.seconds
        on_disk = [*general_faults(seconds), ClockJump(clock, 1), ClockJump(clock, -2)]
        in_bucket: list[Fault] = [BadStorage(proxy, mode, seconds) for mode in ("fails", "stalls", "late")]
        in_bucket += general_faults(seconds)
        if has_small_disk:
            on_disk.append(FullDisk(folder / "runs", seconds / 3))
        else:
            console.print("left out: disk full, which needs a file system of its own, and root to mount it")

        for _ in range(options.rounds):
            for root, faults in ((str(folder / "runs"), on_disk), (f"s3://{BUCKET}/runs", in_bucket)):
                chosen = [fault for fault in faults if options.only in fault.name]
                rng.shuffle(chosen)

                def begin(root: str = root, number: int = ITERATIONS_PER_FAULT * len(chosen)) -> Training:
                    config = small_run(f"chaos-{next(numbers)}", root, train={"iterations": 2 + number})
                    return Training(stack, config)

                done += run_through(begin, chosen, rng, console.print)
        console.print(table(done))
    lost = [what for injection in done for what in injection.lost]
    assert not lost, f"lost: {'; '.join(lost)}"


if __name__ == "__main__":
    main()
