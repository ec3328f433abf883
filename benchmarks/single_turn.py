"""A run on given prompts with one request per session and a reward that costs nothing.

The prompts come from the JSON file named by SF_BENCHMARK_PROMPTS: [{"user": ..., "text": rendered}, ...].
The agent sends plain HTTP; the openai package would cost three times the CPU per request.
"""

from __future__ import annotations

import json
import os
from asyncio import AbstractEventLoop, get_running_loop
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from sf_core.types import Endpoint, Task

Message = dict[str, str]


@cache
def prompts() -> list[str]:
    return [
        item["user"]
        for item in json.loads(Path(os.environ["SF_BENCHMARK_PROMPTS"]).read_text(encoding="utf-8"))
    ]


def tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "benchmark", prompts()[index % len(prompts())])


async def agent(task: Task, endpoint: Endpoint) -> str:
    return await ask(endpoint, task.prompt)


async def ask(endpoint: Endpoint, prompt: str, **options: Any) -> str:
    """Text of one chat completion; `options` are further fields of the request."""
    return await answer(endpoint, [{"role": "user", "content": prompt}], **options)


async def answer(endpoint: Endpoint, messages: list[Message], **options: Any) -> str:
    """Text of the answer to a conversation."""
    body = {"model": endpoint.model, "messages": messages, **options}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    http = connections(get_running_loop())
    async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        completion = await response.json()
    return str(completion["choices"][0]["message"]["content"] or "")


@cache
def connections(loop: AbstractEventLoop) -> ClientSession:
    """One pool per event loop, without limits: a request may wait for a new policy."""
    return ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0))


def reward(task: Task, answer: str) -> float:
    return float(len(set(answer)))
