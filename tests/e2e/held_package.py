"""The echo package, in which a test says which sessions may begin, and can hold an engine with work in it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from sf_core.types import Endpoint, Task
from tests.e2e import echo_package
from tests.e2e.echo_package import reward, tasks

__all__ = ["agent", "reward", "script", "tasks"]


async def agent(task: Task, endpoint: Endpoint) -> str:
    """Three groups at a time: groups 3 to 5 begin when the folder GATES has a file 1, and so on."""
    _, split, index = task.task_id.split("-")
    if split == "train":
        gate = Path(os.environ["GATES"], str(int(index) // 3))
        while not gate.exists():
            await asyncio.sleep(0.05)
    return await echo_package.agent(task, endpoint)


def script(prompt_ids: list[int], seed: int) -> list[int]:
    """While the file HOLD exists, the engine that has this variable stands still and says so beside it."""
    if hold := os.environ.get("HOLD"):
        while Path(hold).exists():
            Path(f"{hold}ing").touch()
            time.sleep(0.02)
    return echo_package.script(prompt_ids, seed)
