"""Questions, an agent that answers held-out ones, and what callers think of an answer."""

from seamlessflow import Endpoint, Task

ASKED = ["rain", "bread", "glass", "a bee", "gold", "a river", "tea", "a bicycle"]
HELD_OUT = ["snow", "cheese", "steel", "an ant", "silver", "a lake", "coffee", "a train"]


def tasks(split: str, index: int) -> Task:
    things = ASKED if split == "train" else HELD_OUT
    return Task(f"{split}-{index}", "desk", f"What is {things[index % len(things)]}?")


async def agent(task: Task, endpoint: Endpoint) -> str:
    reply = await endpoint.client().chat.completions.create(
        model=endpoint.model, messages=[{"role": "user", "content": task.prompt}]
    )
    return reply.choices[0].message.content or ""


def reward(task: Task, answer: str) -> float:
    return stars(task.prompt, answer) / 5


def stars(question: str, draft: str) -> int:
    """0 for a draft that does not name the thing; else 1 to 5, more for a shorter draft."""
    if question.rstrip("?").split()[-1] not in draft.lower():
        return 0
    return 1 + max(0, 4 - max(0, len(draft.split()) - 10) // 6)
