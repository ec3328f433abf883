"""Repair: a function fails its check. Edit it and run the check, by tools, until it passes; hidden tests say
whether it is right. Small enough for the built-in policy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from typing import Any

from pydantic import Field

from seamlessflow import (
    Demonstration,
    Endpoint,
    Environment,
    LostToolError,
    Sandbox,
    SandboxError,
    Split,
    Task,
    Tool,
    open_sandbox,
    run_tool_loop,
    split_of,
    why_no_sandbox,
)
from seamlessflow.programs import LIMITS, HiddenTests, RewardFor, returns_of

NAME = "f"
OPERATORS = "+-*"
NUMBERS = range(2, 16)
"""What numbers in functions and calls are drawn from."""

PASSED = "ok"
"""What the check says of a function that passes."""

GIVE_UP = 0.4
"""Probability that a demonstration ends after a check that fails."""


class Repair(Environment):
    """Functions of one line in which one operator is wrong."""

    operators: int = Field(2, ge=1, le=4)
    """Number of operators in each function."""
    tests: int = Field(8, ge=1, le=20)
    """Number of hidden tests of each function."""
    reward_for: RewardFor = "all"
    max_turns: int = Field(9, ge=1)
    """Most answers of the policy in a session: calls of its tools, and the last one."""

    def tasks(self, split: Split, index: int) -> Task:
        random = Random(f"{self.operators} {split} {index}")
        while True:
            right = _draw(random, self.operators)
            wrong = _changed(right, random)
            telling = _telling_calls(wrong, right)
            # 2*2 is 2+2
            if len(telling) > self.tests:
                check, *hidden = random.sample(telling, 1 + self.tests)
                fault = Fault(wrong, check, _function(right)(*check))
                if split_of(fault.prompt) == split:
                    break
        tests = HiddenTests.make(NAME, _source(right), _function(right), hidden)
        return Task(
            task_id=f"repair-{self.operators}-{split}-{index}",
            environment="repair",
            prompt=fault.prompt,
            answer=tests.to_text(),
            metadata=asdict(fault),
        )

    @asynccontextmanager
    async def prepare(self, task: Task) -> AsyncIterator[Bench]:
        async with open_sandbox(LIMITS) as box:
            fault = Fault(**task.metadata)
            yield Bench(fault.wrong, fault, box)

    async def agent(self, task: Task, endpoint: Endpoint, bench: Bench) -> str:
        """Returns the source of the function as the agent left it."""
        tools = [replace(tool, function=partial(tool.function, bench)) for tool in TOOLS]
        await run_tool_loop(endpoint, task.prompt, tools, self.max_turns)
        return _source(bench.expression)

    async def reward(self, task: Task, answer: str) -> float:
        return await HiddenTests.from_text(task.answer).reward(answer, self.reward_for)

    def why_not_here(self) -> str | None:
        return why_no_sandbox()

    def demonstrate(self, index: int) -> Demonstration:
        """A search that knows the tools and nothing else: it changes any operator, and gives up at any time.
        What to change, and to go on until the check passes, is left to be learned."""
        task = self.tasks("train", index)
        random = Random(index)
        fault = Fault(**task.metadata)
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        for _ in range(self.max_turns // 2):
            tried = _changed(fault.wrong, random)
            verdict = fault.verdict(json.dumps(_function(tried)(*fault.call)))
            messages += [*_called("edit", "", expression=tried), *_called("check", verdict)]
            if verdict == PASSED or random.random() < GIVE_UP:
                break
        messages.append({"role": "assistant", "content": PASSED})
        return Demonstration(messages, [tool.schema for tool in TOOLS])


@dataclass(frozen=True, slots=True)
class Fault:
    wrong: str
    """An expression of x and y."""
    call: list[int]
    """x and y of the check."""
    expected: int

    @property
    def prompt(self) -> str:
        return f"{_source(self.wrong)}assert {NAME}({self.call[0]},{self.call[1]})=={self.expected}"

    def verdict(self, returned: str | None) -> str:
        """What the check says, after the function returned this."""
        return PASSED if returned == json.dumps(self.expected) else returned or "error"


@dataclass(slots=True)
class Bench:
    """The function under repair, in a sandbox."""

    expression: str
    fault: Fault
    box: Sandbox

    def edit(self, expression: str) -> str:
        self.expression = expression
        return ""

    async def check(self) -> str:
        try:
            [returned] = await returns_of(self.box, _source(self.expression), NAME, [self.fault.call])
        except SandboxError as error:
            raise LostToolError(str(error)) from error
        return self.fault.verdict(returned)


TOOLS = (
    Tool(
        "edit",
        "Write anew what the function returns, such as x+y.",
        {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        Bench.edit,
    ),
    Tool("check", "Run the check.", {"type": "object", "properties": {}}, Bench.check),
)


def _source(expression: str) -> str:
    return f"def {NAME}(x,y): return {expression}\n"


def _draw(random: Random, operators: int) -> str:
    """x and y in any order, then numbers."""
    operands = [*random.sample("xy", 2), *(str(random.choice(NUMBERS)) for _ in range(operators - 1))]
    rest = (random.choice(OPERATORS) + operand for operand in operands[1:])
    return operands[0] + "".join(rest)


def _changed(expression: str, random: Random) -> str:
    """The expression with another operator in one place."""
    place = random.choice([i for i, character in enumerate(expression) if character in OPERATORS])
    other = random.choice(OPERATORS.replace(expression[place], ""))
    return expression[:place] + other + expression[place + 1 :]


def _telling_calls(wrong: str, right: str) -> list[list[int]]:
    """The calls for which the two expressions have different values."""
    before = _function(wrong)
    after = _function(right)
    return [[x, y] for x in NUMBERS for y in NUMBERS if before(x, y) != after(x, y)]


def _function(expression: str) -> Callable[[int, int], int]:
    """What an expression computes that was drawn here."""
    return eval(f"lambda x, y: {expression}")


def _called(tool: str, result: str, **arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call", "type": "function", "function": {"name": tool, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": result},
    ]
