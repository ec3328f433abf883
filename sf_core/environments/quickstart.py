"""The quickstart: words spelled backward and sums done with a calculator, in equal parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from sf_core.agents.tool_loop import Tool, run_tool_loop
from sf_core.environments.calculator import CALCULATOR, Calculator
from sf_core.environments.environment import Demonstration, Environment
from sf_core.environments.reasoning_gym import Dataset, demonstrate_answer
from sf_core.environments.splits import HasTasks, Split, in_equal_parts
from sf_core.types import Endpoint, Task

ENVIRONMENTS: dict[str, Dataset | Calculator] = {
    "spell_backward": Dataset("spell_backward", min_word_len=3, max_word_len=6),
    "calculator": Calculator(),
}
TOOLS: dict[str, tuple[Tool, ...]] = {"spell_backward": (), "calculator": (CALCULATOR,)}


class Quickstart(Environment):
    """Two kinds of tasks: spelling words backward in one turn, and computing sums with a calculator in
    several turns."""

    parts: tuple[Literal["spell_backward", "calculator"], ...] = Field(
        ("spell_backward", "calculator"), min_length=1
    )
    """Kinds of tasks. By default both kinds."""

    def tasks(self, split: Split, index: int) -> Task:
        return in_equal_parts(self.sources, split, index)

    @property
    def sources(self) -> Mapping[str, HasTasks]:
        return {part: ENVIRONMENTS[part] for part in self.parts}

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        return await run_tool_loop(endpoint, task.prompt, TOOLS[task.environment])

    def reward(self, task: Task, answer: str) -> dict[str, float]:
        return {"answer": ENVIRONMENTS[task.environment].score(task, answer)}

    def demonstrate(self, index: int) -> Demonstration | None:
        task = self.tasks("train", index)
        return _calculate(task) if task.environment == "calculator" else demonstrate_answer(task)


def _calculate(task: Task) -> Demonstration:
    function = {"name": CALCULATOR.name, "arguments": {"expression": task.metadata["expression"]}}
    call = {"id": "call_0", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": task.prompt},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": task.answer},
        {"role": "assistant", "content": task.answer},
    ]
    return Demonstration(messages, [CALCULATOR.schema])


_QUICKSTART = Quickstart()
# the configurations of earlier runs name these
tasks = _QUICKSTART.tasks
agent = _QUICKSTART.agent
reward = _QUICKSTART.reward
