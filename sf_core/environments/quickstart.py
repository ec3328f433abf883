"""What the quickstart trains on: words spelled backward and sums done with a calculator, in equal parts."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random
from typing import Any

from sf_core.agents.tool_loop import run_tool_loop
from sf_core.environments.calculator import CALCULATOR, Calculator, evaluate
from sf_core.environments.reasoning_gym import ReasoningGym
from sf_core.environments.splits import Split
from sf_core.types import Endpoint, Task

ENVIRONMENTS = {
    "spell_backward": ReasoningGym("spell_backward", min_word_len=3, max_word_len=6),
    "calculator": Calculator(),
}
TOOLS = {"spell_backward": (), "calculator": (CALCULATOR,)}


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


def demonstrate(index: int, seed: int) -> Demonstration:
    """How a careless expert works on a training task: what to do is right, single characters are often not."""
    task = tasks("train", index)
    random = Random(seed << 40 | index)
    if task.environment == "calculator":
        return _demonstrate_call(task, random)
    return Demonstration([_user(task), _assistant(_slip(task.answer, random))], None)


SLIP = 0.15


def _demonstrate_call(task: Task, random: Random) -> Demonstration:
    expression = _slip(task.metadata["expression"], random)
    function = {"name": CALCULATOR.name, "arguments": {"expression": expression}}
    result = evaluate(expression)
    messages = [
        _user(task),
        _assistant("", tool_calls=[{"id": "call_0", "type": "function", "function": function}]),
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        _assistant(_slip(result, random)),
    ]
    return Demonstration(messages, [CALCULATOR.schema])


def _user(task: Task) -> dict[str, Any]:
    return {"role": "user", "content": task.prompt}


def _assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _slip(text: str, random: Random) -> str:
    """Replace single letters and digits by others of their kind."""

    def slip(character: str) -> str:
        if random.random() >= SLIP:
            return character
        kind = string.digits if character.isdigit() else string.ascii_lowercase
        return random.choice(kind) if character.isalnum() else character

    return "".join(map(slip, text))
