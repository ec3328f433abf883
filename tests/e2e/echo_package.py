"""A user's own tasks, agent, reward and script: the agent asks for a digit, the script answers one."""

from __future__ import annotations

import asyncio
import os

import openai
import psutil

from sf_core.types import Endpoint, Task


def tasks(split: str, index: int) -> Task:
    return Task(f"echo-{split}-{index}", "echo", f"What is {index % 7}?", str(index % 7))


async def agent(task: Task, endpoint: Endpoint) -> str:
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": task.prompt}]
        )
    return answer.choices[0].message.content or ""


async def slowly_held_out(task: Task, endpoint: Endpoint) -> str:
    """The agent, which takes some seconds over held-out tasks."""
    if task.task_id.startswith("echo-holdout"):
        await asyncio.sleep(4)
    return await agent(task, endpoint)


def reward_with_worker(task: Task, answer: str) -> dict[str, float]:
    """The reward, and a part named after the worker that scores, whose name its nanny was given."""
    command = psutil.Process(os.getppid()).cmdline()
    name = command[command.index("--name") + 1]
    return {"correct": float(task.answer in answer), f"by_{name}": 0.0}


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
