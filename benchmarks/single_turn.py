"""A run on given prompts with one request per session and a reward that costs nothing.

The prompts come from the JSON file named by SF_BENCHMARK_PROMPTS: [{"user": ..., "text": rendered}, ...].
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from sf_core.agents.tool_loop import run_tool_loop
from sf_core.types import Endpoint, Task


@cache
def prompts() -> list[str]:
    return [item["user"] for item in json.loads(Path(os.environ["SF_BENCHMARK_PROMPTS"]).read_text())]


def tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", prompts()[index % len(prompts())])


async def agent(task: Task, endpoint: Endpoint) -> str:
    return await run_tool_loop(endpoint, task.prompt, max_turns=1)


def reward(task: Task, answer: str) -> float:
    return float(len(set(answer)))
