"""Sessions of one request whose lengths have a heavy tail, the same in every run: for emulated engines.

An emulated engine samples as many tokens as it is asked for, so the agent draws the length of its answer.
"""

from __future__ import annotations

from asyncio import get_running_loop

from benchmarks.single_turn import connections
from sf_core.scheduling.simulations import Lognormal
from sf_core.types import Endpoint, Task

LENGTHS = Lognormal(prompt=140, median=600.0, sigma=1.2, longest=5000)
"""About one in twenty-five sessions would be longer, and is cut there as by a token budget."""


def tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", f"{index:06d} " + "x " * 50)


async def agent(task: Task, endpoint: Endpoint) -> str:
    # .../sessions/RUN.gGROUP.MEMBER.aATTEMPT/v1
    _, group, member, _ = endpoint.base_url.split("/")[-2].rsplit(".", 3)
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": task.prompt}],
        "max_tokens": LENGTHS(int(group[1:]), int(member))[1],
    }
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    http = connections(get_running_loop())
    async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        completion = await response.json()
    return str(completion["choices"][0]["message"]["content"] or "")


def reward(task: Task, answer: str) -> float:
    return float(len(answer) % 7)
