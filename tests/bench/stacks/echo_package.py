"""A user's own tasks, agent, reward and script: the agent asks for a digit, the script answers one."""

from __future__ import annotations

import asyncio

from distributed import Event, get_client, get_worker

from sf_core.types import Endpoint, Scored, Task
from tests.bench.waits import patience

ASK = """
import json, os, sys, urllib.request
question = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(question).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["choices"][0]["message"]["content"])
print("asked", file=sys.stderr)
"""
"""The agent as a script of its own, without any SDK."""


def tasks(split: str, index: int) -> Task:
    return Task(f"echo-{split}-{index}", "echo", f"What is {index % 7}?", str(index % 7))


async def ask(task: Task, endpoint: Endpoint) -> dict[str, str]:
    """Text and id of the answer."""
    async with endpoint.client() as client:
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": task.prompt}]
        )
    return {"text": answer.choices[0].message.content or "", "id": answer.id}


async def agent(task: Task, endpoint: Endpoint) -> str:
    return (await ask(task, endpoint))["text"]


async def after_event(task: Task, endpoint: Endpoint) -> dict[str, str]:
    """Agent that asks once the Dask event of the task's split is set. It returns the answer and its id."""
    event = Event("-".join(task.task_id.split("-")[:2]), client=get_client())
    if not await asyncio.to_thread(event.wait, patience()):
        raise TimeoutError(f"nobody set {event.name}")
    return await ask(task, endpoint)


def reward_with_worker(task: Task, answer: dict[str, str]) -> Scored:
    """The reward, with a part named after the worker that scores, and of the answer its length."""
    parts = {"correct": float(task.answer in answer["text"]), f"by_{get_worker().name}": 0.0}
    return Scored(parts, {answer["id"]: len(answer["text"])})


def reward(task: Task, answer: str) -> dict[str, float]:
    return {"correct": float(task.answer in answer), "short": 0.1 * (len(answer) < 6)}


def picky_reward(task: Task, answer: str) -> dict[str, float]:
    """Reward that fails for every third training task."""
    if task.task_id.startswith("echo-train") and int(task.task_id.rpartition("-")[2]) % 3 == 0:
        raise ValueError("this one I do not score")
    return reward(task, answer)


def script(prompt_ids: list[int], seed: int) -> list[int]:
    """A few tokens that differ by seed; the built-in tokenizer's ids start with the special tokens."""
    return [20 + (seed >> shift) % 40 for shift in range(0, 20, 4)]
