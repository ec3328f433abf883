"""Agents with heavy-tailed session lengths, the same in every run: several turns with tool calls in between
on emulated devices; one turn on real ones.

An emulated engine samples as many tokens as requested, so the agent draws the length of its answers. With the
torch engine the policy may stop earlier. SF_BENCHMARK_TIME_DILATION is the number of emulated seconds in a
real one.
"""

from __future__ import annotations

import asyncio
import os

from benchmarks.simulation.variants import TOOLS, Lognormal
from benchmarks.single_turn import Message, answer, ask
from sf_core.types import Endpoint, Task

LENGTHS = Lognormal(prompt=140, median=600.0, sigma=1.2, longest=5000, tools=TOOLS)
"""Cut at `longest` for one length in twenty-five, as by a token budget. Six turns on average, 25 at most."""

TEMPLATE_TOKENS = 8
"""Tokens that the template adds to a message after an answer."""

REAL_LENGTHS = Lognormal(prompt=60, median=60.0, sigma=1.2, longest=440)
"""Lengths for the built-in policy on a CPU core."""


def tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", f"{index:06d} " + "x " * 63 + "x")


def real_tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", f"{index:06d} " + "x " * 20)


async def agent(task: Task, endpoint: Endpoint) -> str:
    pace = float(os.environ.get("SF_BENCHMARK_TIME_DILATION", "1"))
    messages: list[Message] = [{"role": "user", "content": task.prompt}]
    for turn in LENGTHS(*_place(endpoint)):
        if len(messages) > 1:
            messages.append({"role": "user", "content": "y" * (turn.num_new - TEMPLATE_TOKENS)})
        text = await answer(endpoint, messages, max_tokens=turn.num_wanted)
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(turn.tool_s / pace)
    return text


async def real_agent(task: Task, endpoint: Endpoint) -> str:
    return await ask(endpoint, task.prompt, max_tokens=REAL_LENGTHS.length(*_place(endpoint)))


def _place(endpoint: Endpoint) -> tuple[int, int]:
    # .../sessions/RUN.gGROUP.MEMBER.aATTEMPT/v1
    _, group, member, _ = endpoint.base_url.split("/")[-2].rsplit(".", 3)
    return int(group[1:]), int(member)


def reward(task: Task, answer: str) -> float:
    return float(len(answer) % 7)
