"""The tasks of the quickstart: words spelled backward and sums done with a calculator, in equal parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sf_core.agents.tool_loop import Tool, run_tool_loop
from sf_core.environments.calculator import CALCULATOR, Calculator
from sf_core.environments.reasoning_gym import ReasoningGym
from sf_core.environments.splits import Split
from sf_core.types import Endpoint, Task

ENVIRONMENTS: dict[str, ReasoningGym | Calculator] = {
    "spell_backward": ReasoningGym("spell_backward", min_word_len=3, max_word_len=6),
    "calculator": Calculator(),
}
TOOLS: dict[str, tuple[Tool, ...]] = {"spell_backward": (), "calculator": (CALCULATOR,)}


def tasks(split: Split, index: int) -> Task:
    names = list(ENVIRONMENTS)
    return ENVIRONMENTS[names[index % len(names)]].task(split, index // len(names))


async def agent(task: Task, endpoint: Endpoint) -> str:
    return await run_tool_loop(endpoint, task.prompt, TOOLS[task.environment])


def reward(task: Task, answer: str) -> dict[str, float]:
    return {"answer": ENVIRONMENTS[task.environment].score(task, answer)}


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate, in the form chat templates take."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def demonstrate(index: int) -> Demonstration:
    """A correct solution of a training task."""
    task = tasks("train", index)
    if task.environment == "calculator":
        return _calculate(task)
    return Demonstration([_user(task), _assistant(task.answer)], None)


def _calculate(task: Task) -> Demonstration:
    function = {"name": CALCULATOR.name, "arguments": {"expression": task.metadata["expression"]}}
    messages = [
        _user(task),
        _assistant("", tool_calls=[{"id": "call_0", "type": "function", "function": function}]),
        {"role": "tool", "tool_call_id": "call_0", "content": task.answer},
        _assistant(task.answer),
    ]
    return Demonstration(messages, [CALCULATOR.schema])


def _user(task: Task) -> dict[str, Any]:
    return {"role": "user", "content": task.prompt}


def _assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}
