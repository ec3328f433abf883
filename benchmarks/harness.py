"""What a sandbox costs a command as agent, and what preparing ahead saves. Prints one JSON line.

    python -m benchmarks.harness [--sessions 200] [--at-once 200] [--prepared 40]

The baseline is the same command as agent without a sandbox: a process with its keeper. The command is a shell
that reads its task and prints an answer; no model is asked, so what is measured is start and end.

Predicted before the first run, for one core: 20 sessions a second in sandboxes (Python's start without
`site` is 10 ms, bubblewrap's work 10 ms, and both ends of it 10 ms on the worker) and 15 with keepers,
which start the same Python and make three folders. So a sandbox adds nothing to a session, and 3 ms to a
command where it is open already. Two hundred at once take 12 MB each. Nothing is left after kill -9.

sessions: sessions per second and core, as many at once as there are cores, by side. session_ms: median of
sessions one after the other, by side; added_ms: their difference. command_ms: median of a command in a
sandbox that is open, and by subprocess.run. at_once: sandboxes that were open together, how many answered,
seconds until the last was open, and memory of their processes (PSS) for each in MB. left: processes,
folders and mounts that were there up to 10 s after kill -9 of a worker with as many.

preparing: sessions that take 2 s to prepare and 1 s to run, on 4 places, with 8 prepared ahead and without.
Predicted: from the end of a session to the first request of the next in its place 2.0 s without and below
0.1 s with, so 1.3 and 4 sessions a second; from the claim of a session to its first request 2.0 s without
and longer with, because it is claimed earlier and waits for its place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.preparing import preparing
from sf_core.agents.command import CommandAgent
from sf_core.agents.sandbox import open_sandbox
from sf_core.config.programs import Command, SandboxLimits
from sf_core.process.limits import raise_open_files
from sf_core.types import Endpoint, Task

WORDS = ("sh", "-c", "cat > /dev/null; echo 42")
TASK = Task("t", "harness", "What is 6 * 7?")
ENDPOINT = Endpoint("http://127.0.0.1:9/sessions/s/v1", "key", "policy")
SIDES = {"sandbox": SandboxLimits(), "keeper": None}
LIMIT_S = 600.0
PATIENCE_S = 10.0

WORKER = """
import asyncio
from benchmarks.harness import hold
asyncio.run(hold({number}))
"""


async def sessions_per_s(agent: Callable[[Task, Endpoint], Awaitable[Any]], number: int) -> float:
    """Per core."""
    cores = os.cpu_count() or 1
    left = iter(range(number))

    async def work() -> None:
        for _ in left:
            assert (await agent(TASK, ENDPOINT)).answer == "42\n"

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(cores)))
    return number / (time.perf_counter() - start) / cores


async def session_ms(agent: Callable[[Task, Endpoint], Awaitable[Any]], number: int) -> float:
    times = []
    for _ in range(number):
        start = time.perf_counter()
        await agent(TASK, ENDPOINT)
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


async def command_ms(number: int) -> dict[str, float]:
    inside = []
    outside = []
    async with open_sandbox(SandboxLimits()) as box:
        for _ in range(number):
            start = time.perf_counter()
            await box.run(WORDS, timeout_s=LIMIT_S)
            inside.append(time.perf_counter() - start)
            start = time.perf_counter()
            subprocess.run(WORDS, stdin=subprocess.DEVNULL, capture_output=True, check=True)
            outside.append(time.perf_counter() - start)
    return {"sandbox": 1000 * median(inside), "subprocess": 1000 * median(outside)}


async def at_once(number: int) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        start = time.perf_counter()
        opened = (stack.enter_async_context(open_sandbox(SandboxLimits())) for _ in range(number))
        boxes = await asyncio.gather(*opened)
        seconds = time.perf_counter() - start
        ended = await asyncio.gather(*(box.run(WORDS, timeout_s=LIMIT_S) for box in boxes))
        processes = psutil.Process().children(recursive=True)
        memory = sum(process.memory_full_info().pss for process in processes)
    return {
        "sandboxes": number,
        "answered": sum(end.output == "42\n" for end in ended),
        "opened_s": round(seconds, 2),
        "mb_each": round(memory / number / 2**20, 1),
    }


async def hold(number: int) -> None:
    """Have sandboxes at work until the process is killed."""
    async with AsyncExitStack() as stack:
        opened = (stack.enter_async_context(open_sandbox(SandboxLimits())) for _ in range(number))
        boxes = await asyncio.gather(*opened)
        words = ("sh", "-c", "setsid -f sleep 1000; echo begun; sleep 1000")
        working = [asyncio.create_task(box.run(words, timeout_s=LIMIT_S)) for box in boxes]
        await asyncio.sleep(1)
        print("held", flush=True)
        await asyncio.gather(*working)


def left_after_a_kill(number: int) -> dict[str, int]:
    mounts = _mounts()
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", WORKER.format(number=number)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": scratch})
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"held\n"
        processes = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        worker.wait()
        worker.stdout.close()
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        running = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        return {
            "killed_with": len(processes),
            "processes": len(running),
            "folders": len(list(Path(scratch).iterdir())),
            "mounts": _mounts() - mounts,
        }


def _mounts() -> int:
    return len(Path("/proc/mounts").read_text(encoding="utf-8").splitlines())


async def measured(sessions: int, sandboxes: int) -> dict[str, Any]:
    agents = {
        side: CommandAgent(Command(command=WORDS, sandbox=limits, timeout_s=LIMIT_S)).run
        for side, limits in SIDES.items()
    }
    each = max(1, sessions // 4)
    ms = {side: await session_ms(agent, each) for side, agent in agents.items()}
    rates = {side: await sessions_per_s(agent, sessions) for side, agent in agents.items()}
    return {
        "benchmark": "harness",
        "sessions": _rounded(rates),
        "session_ms": _rounded(ms),
        "added_ms": round(ms["sandbox"] - ms["keeper"], 1),
        "command_ms": _rounded(await command_ms(each)),
        "at_once": await at_once(sandboxes),
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(figure, 1) for name, figure in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--prepared", type=int, default=40)
    given = parser.parse_args()
    raise_open_files()
    figures = asyncio.run(measured(given.sessions, given.at_once))
    figures["left"] = left_after_a_kill(given.at_once)
    print(json.dumps(figures | {"preparing": preparing(given.prepared)}))


if __name__ == "__main__":
    main()
