"""Held-out questions of the desk in docs/guides/agents/product.md, and what its callers think of a draft."""

from __future__ import annotations

from sf_core.types import Endpoint, Task

QUESTIONS = ("Say something.", "And then?", "Who?", "Why?")


def tasks(split: str, index: int) -> Task:
    return Task(f"desk-{split}-{index}", "desk", QUESTIONS[index % len(QUESTIONS)])


async def agent(task: Task, endpoint: Endpoint) -> str:
    async with endpoint.client() as client:
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": task.prompt}]
        )
    return answer.choices[0].message.content or ""


def reward(task: Task, answer: str) -> float:
    return stars(answer) / 5


def stars(draft: str) -> float:
    """Up to five, for drafts in small letters."""
    return 5 * sum(letter.islower() for letter in draft) / max(1, len(draft))
