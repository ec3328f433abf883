"""The echo package with sessions of several branches. Those of the second batch keep asking while the first
is trained on."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import httpx

from sf_core.dataplane.operator_key import operator_key
from sf_core.types import Endpoint, Task
from storage.run_directory import STAGES
from tests.bench.stacks.echo_package import reward, tasks

__all__ = ["agent", "reward", "tasks"]

GROUPS_PER_BATCH = 3


async def agent(task: Task, endpoint: Endpoint) -> str:
    """Agent that asks, asks further, and replaces that second question by others."""
    _, split, index = task.task_id.split("-")
    is_later = split == "train" and int(index) >= GROUPS_PER_BATCH
    while is_later and not await has_come_to(endpoint, "train"):
        await asyncio.sleep(0.02)
    async with endpoint.client() as client:

        async def ask(*texts: str) -> str:
            asked: list[Any] = [
                {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
            ]
            answer = await client.chat.completions.create(model=endpoint.model, messages=asked)
            return answer.choices[0].message.content or ""

        first = await ask(task.prompt)
        await ask(task.prompt, first, "Are you sure?")
        for number in count():
            answer = await ask(task.prompt, first, f"Say it again, for the {number}th time.")
            if not is_later or await has_come_to(endpoint, "publish"):
                break
    return answer


async def has_come_to(endpoint: Endpoint, stage: str) -> bool:
    """Whether the run has reached this stage of its first iteration."""
    root, _, session = endpoint.base_url.partition("/sessions/")
    # the endpoint's key opens the turns of its session only
    headers = {"Authorization": f"Bearer {operator_key(root)}"}
    async with httpx.AsyncClient(headers=headers) as client:
        status = (await client.get(f"{root}/runs/{session.rsplit('.', 3)[0]}")).raise_for_status().json()
    # the first evaluation is a stage of its own, and before the first stage there is none
    is_there = status.get("stage") in STAGES[STAGES.index(stage) :]
    return is_there or status.get("iteration", 0) > 0
