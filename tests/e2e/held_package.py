"""The echo package, in which a test controls which sessions begin, and can stop an engine with work in it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from sf_core.types import Endpoint, Task
from tests.bench.stacks import echo_package
from tests.bench.stacks.echo_package import reward, tasks

__all__ = ["agent", "reward", "script", "tasks"]


async def agent(task: Task, endpoint: Endpoint) -> str:
    """Agent that begins three groups at a time: 3 to 5 when the folder GATES has a file 1, and so on."""
    _, split, index = task.task_id.split("-")
    if split == "train":
        gate = Path(os.environ["GATES"], str(int(index) // 3))
        while not gate.exists():
            await asyncio.sleep(0.05)
    return await echo_package.agent(task, endpoint)


def script(prompt_ids: list[int], seed: int) -> list[int]:
    """Script whose engine blocks while the file $HOLD exists, and creates $HOLDing meanwhile."""
    if hold := os.environ.get("HOLD"):
        while Path(hold).exists():
            Path(f"{hold}ing").touch()
            time.sleep(0.02)
    return echo_package.script(prompt_ids, seed)
