"""Sessions whose phases last long enough to be met in each: prepared, run by a command, scored. Which are in
which is told by files in the folder of the environment variable PHASES, each named after its phase and the
process that works on it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from sf_core.types import Task
from tests.bench.stacks import echo_package

PHASE_S = 0.4

SCRIPT = f"""
assert open("a/file.txt").read() == "prepared"
{echo_package.ASK}
import time
time.sleep({PHASE_S})
"""
"""A harness without any SDK, for `python -c`."""

tasks = echo_package.tasks


@contextmanager
def told(phase: str) -> Iterator[None]:
    with tempfile.NamedTemporaryFile(dir=os.environ["PHASES"], prefix=f"{phase}-{os.getpid()}-"):
        yield


@asynccontextmanager
async def prepare(task: Task) -> AsyncIterator[dict[str, str]]:
    with told("preparing"):
        await asyncio.sleep(PHASE_S)
    yield {"a/file.txt": "prepared"}


async def reward(task: Task, answer: str) -> dict[str, float]:
    with told("scoring"):
        await asyncio.sleep(PHASE_S)
    return echo_package.reward(task, answer)


def working_on(phase: str, folder: Path) -> set[int]:
    """Processes that work on a session in this phase; some may have been killed."""
    return {int(file.name.split("-")[1]) for file in folder.glob(f"{phase}-*")}
