"""Agents whose sessions have lengths with a heavy tail, the same in every run: several turns, between which
tools take their time, on emulated devices; one turn on real ones.

An emulated engine samples as many tokens as it is asked for, so the agent draws the length of its answers.
The torch engine samples at most so many: the policy may stop before. SF_BENCHMARK_TIME_DILATION says how many
emulated seconds pass in a real one.
"""

from __future__ import annotations

import asyncio
import os

from benchmarks.single_turn import Message, answer, ask
from sf_core.scheduling.simulation.variants import TOOLS, Lognormal
from sf_core.types import Endpoint, Task

LENGTHS = Lognormal(prompt=140, median=600.0, sigma=1.2, longest=5000, tools=TOOLS)
"""About one in twenty-five sessions would be longer, and is cut there as by a token budget. Six turns on
average, 25 at most."""

TEMPLATE_TOKENS = 8
"""Tokens of marks and roles in a message that follows an answer."""

REAL_LENGTHS = Lognormal(prompt=60, median=60.0, sigma=1.2, longest=440)
"""For the built-in policy on a CPU core."""


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
