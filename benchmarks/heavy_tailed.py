"""Sessions of one request whose lengths have a heavy tail, the same in every run.

An emulated engine samples as many tokens as it is asked for, so the agent draws the length of its answer. The
torch engine samples at most so many: the policy may stop before.
"""

from __future__ import annotations

from benchmarks.single_turn import ask
from sf_core.scheduling.simulations import Lognormal
from sf_core.types import Endpoint, Task

LENGTHS = Lognormal(prompt=140, median=600.0, sigma=1.2, longest=5000)
"""About one in twenty-five sessions would be longer, and is cut there as by a token budget."""


REAL_LENGTHS = Lognormal(prompt=60, median=60.0, sigma=1.2, longest=440)
"""For the built-in policy on a CPU core."""


def tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", f"{index:06d} " + "x " * 50)


def real_tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", f"{index:06d} " + "x " * 20)


async def agent(task: Task, endpoint: Endpoint) -> str:
    return await ask(endpoint, task.prompt, max_tokens=_num_wanted(LENGTHS, endpoint))


async def real_agent(task: Task, endpoint: Endpoint) -> str:
    return await ask(endpoint, task.prompt, max_tokens=_num_wanted(REAL_LENGTHS, endpoint))


def _num_wanted(lengths: Lognormal, endpoint: Endpoint) -> int:
    # .../sessions/RUN.gGROUP.MEMBER.aATTEMPT/v1
    _, group, member, _ = endpoint.base_url.split("/")[-2].rsplit(".", 3)
    return lengths(int(group[1:]), int(member))[1]


def reward(task: Task, answer: str) -> float:
    return float(len(answer) % 7)
