"""Sessions of one request whose lengths have a heavy tail, the same in every run: for emulated engines.

An emulated engine samples as many tokens as it is asked for, so the agent draws the length of its answer.
"""

from __future__ import annotations

from benchmarks.single_turn import ask
from sf_core.scheduling.simulations import Lognormal
from sf_core.types import Endpoint, Task

LENGTHS = Lognormal(prompt=140, median=600.0, sigma=1.2, longest=5000)
"""About one in twenty-five sessions would be longer, and is cut there as by a token budget."""


def tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", f"{index:06d} " + "x " * 50)


async def agent(task: Task, endpoint: Endpoint) -> str:
    # .../sessions/RUN.gGROUP.MEMBER.aATTEMPT/v1
    _, group, member, _ = endpoint.base_url.split("/")[-2].rsplit(".", 3)
    _, num_wanted = LENGTHS(int(group[1:]), int(member))
    return await ask(endpoint, task.prompt, max_tokens=num_wanted)


def reward(task: Task, answer: str) -> float:
    return float(len(answer) % 7)
