"""An environment of two parts, on which the scripted engine answers right now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sf_core.environments.environment import Environment
from sf_core.environments.splits import Split, in_equal_parts
from sf_core.types import Endpoint, Task
from tests.bench.stacks import echo_package


@dataclass(frozen=True)
class Digits:
    name: str
    first: int

    def task(self, split: Split, index: int) -> Task:
        digit = str(self.first + index % 5)
        return Task(f"{self.name}-{split}-{index}", self.name, f"What is {digit}?", digit)


class Echoes(Environment):
    @property
    def sources(self) -> Mapping[str, Digits]:
        return {"low": Digits("low", 0), "high": Digits("high", 5)}

    def tasks(self, split: Split, index: int) -> Task:
        return in_equal_parts(self.sources, split, index)

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        return await echo_package.agent(task, endpoint)

    def reward(self, task: Task, answer: str) -> dict[str, float]:
        return echo_package.reward(task, answer)
