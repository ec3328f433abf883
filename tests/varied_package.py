"""Tasks for an untrained policy. The more kinds of characters an answer has, the more it earns, so rewards
differ from the first answer on."""

from __future__ import annotations

from sf_core.types import Endpoint, Task


def tasks(split: str, index: int) -> Task:
    return Task(f"varied-{split}-{index}", "varied", f"Write {index} words.", "")


async def agent(task: Task, endpoint: Endpoint) -> str:
    async with endpoint.client() as client:
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": task.prompt}]
        )
    return answer.choices[0].message.content or ""


def reward(task: Task, answer: str) -> float:
    return len(set(answer)) / 24
