"""Prompts from a file, to read a policy's answers to them. There is nothing to earn."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from pydantic import Field

from sf_core.agents.tool_loop import open_client
from sf_core.environments.environment import Environment
from sf_core.environments.splits import Split
from sf_core.types import Endpoint, Task


class Prompts(Environment):
    """One answer to each line of a JSONL file: {"prompt": TEXT}, or {"messages": [...]}."""

    file: str = Field(min_length=1)
    """Path of the file, on every agent worker."""

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        try:
            with open(self.file) as file:
                return [self._parsed(number, line) for number, line in enumerate(file, 1) if line.strip()]
        except OSError as error:
            raise ValueError(f"{self.file}: cannot be read: {error.strerror}") from None

    def _parsed(self, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.file}, line {number}: no JSON: {error}") from None
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            return {"messages": [{"role": "user", "content": row["prompt"]}]}
        if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
            return row
        raise ValueError(f'{self.file}, line {number}: expected {{"prompt": TEXT}} or {{"messages": [...]}}')

    def __len__(self) -> int:
        return len(self._lines)

    def tasks(self, split: Split, index: int) -> Task:
        if index >= len(self):
            raise ValueError(f"{self.file}: has {len(self)} prompts; there is none with index {index}")
        messages = self._lines[index]["messages"]
        prompt = str(messages[-1].get("content") or "")
        return Task(f"prompts-{index}", "prompts", prompt, metadata={"messages": messages})

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        client = await open_client(endpoint)
        reply = await client.chat.completions.create(model=endpoint.model, messages=task.metadata["messages"])
        return reply.choices[0].message.content or ""

    def reward(self, task: Task, answer: str) -> float:
        return 0.0
