"""Programs: write a function from its description; hidden tests say how much of it is right."""

from __future__ import annotations

import re
from random import Random

from pydantic import Field

from examples.programs.operations import KINDS, NAME, Chain, Value, draw_chain, draw_values
from seamlessflow import Endpoint, Environment, Split, Task, run_tool_loop, split_of, why_no_sandbox
from seamlessflow.programs import HiddenTests, RewardFor

FENCED = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)

NUM_EXAMPLES = 2
"""Calls that the prompt shows; they are none of the hidden tests."""


class Programs(Environment):
    """Functions that do some small operations one after the other, in one turn."""

    difficulty: int = Field(2, ge=1, le=5)
    """Number of operations."""
    tests: int = Field(10, ge=1, le=100)
    """Number of hidden tests of each function."""
    reward_for: RewardFor = "share"

    def tasks(self, split: Split, index: int) -> Task:
        chain = self._chain(split, index)
        # functions that do the same have the same examples and tests
        values = draw_values(Random(chain.behaviour), chain.takes, NUM_EXAMPLES + self.tests)
        tests = HiddenTests.make(NAME, chain.source, chain, [[value] for value in values[NUM_EXAMPLES:]])
        return Task(
            task_id=f"programs-{self.difficulty}-{split}-{index}",
            environment="programs",
            prompt=_described(chain, values[:NUM_EXAMPLES]),
            answer=tests.to_text(),
        )

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        return await run_tool_loop(endpoint, task.prompt)

    async def reward(self, task: Task, answer: str) -> float:
        return await HiddenTests.from_text(task.answer).reward(program_in(answer), self.reward_for)

    def why_not_here(self) -> str | None:
        return why_no_sandbox()

    def _chain(self, split: Split, index: int) -> Chain:
        random = Random(f"{self.difficulty} {split} {index}")
        while split_of((chain := draw_chain(random, self.difficulty)).behaviour) != split:
            pass
        return chain


def program_in(answer: str) -> str:
    """The last fenced block of an answer, or all of it."""
    return str((FENCED.findall(answer) or [answer])[-1])


def _described(chain: Chain, shown: list[Value]) -> str:
    steps = [f"{number}. {operation.says}" for number, operation in enumerate(chain.operations, 1)]
    examples = [f"{NAME}({value!r}) returns {chain(value)!r}" for value in shown]
    return "\n".join(
        [
            f"Write a Python function {NAME}(value). It takes {KINDS[chain.takes]} and does, step by step:",
            *steps,
            f"It returns the result, {KINDS[chain.gives]}. For example:",
            *examples,
        ]
    )
