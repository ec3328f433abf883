"""Prompts from a file, to read a policy's answers to them. There is nothing to earn."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

from pydantic import Field

from sf_core.environments.environment import Environment
from sf_core.environments.splits import Split
from sf_core.types import Endpoint, Task
from storage.files import read_bytes
from storage.json_files import json_lines


class Prompts(Environment):
    """Each line of a JSONL file is one task: {"prompt": TEXT} or {"messages": [...]}."""

    file: str = Field(min_length=1)
    """Path of the file. Every agent worker must be able to read the file at this path."""
    sha256: str | None = None
    """Expected SHA-256 of the file. A file with another SHA-256 is refused. Empty: no check."""

    @cached_property
    def _content(self) -> bytes:
        try:
            return read_bytes(self.file)
        except OSError as error:
            raise ValueError(f"{self.file}: cannot be read: {error.strerror or error}") from None

    @property
    def digest(self) -> str:
        """SHA-256 of the file as it is."""
        return hashlib.sha256(self._content).hexdigest()

    @cached_property
    def _prompts(self) -> list[list[dict[str, Any]]]:
        """The messages of each line. Raises ValueError with one sentence if a line has none."""
        if self.sha256 not in (None, self.digest):
            raise ValueError(f"{self.file}: the SHA-256 of the file differs from the setting sha256")
        tasks = [_parse(where, row) for where, row in json_lines(self.file, self._content)]
        if not tasks:
            raise ValueError(f"{self.file}: has no prompts")
        return tasks

    def __len__(self) -> int:
        return len(self._prompts)

    def tasks(self, split: Split, index: int) -> Task:
        if index >= len(self):
            raise ValueError(f"{self.file}: the file has {len(self)} prompts; index {index} does not exist")
        messages = self._prompts[index]
        prompt = str(messages[-1].get("content") or "")
        return Task(f"prompts-{index}", "prompts", prompt, metadata={"messages": messages})

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        client = endpoint.client()
        reply = await client.chat.completions.create(model=endpoint.model, messages=task.metadata["messages"])
        return reply.choices[0].message.content or ""

    def reward(self, task: Task, answer: str) -> float:
        return 0.0


def _parse(where: str, row: Any) -> list[dict[str, Any]]:
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    raise ValueError(f'{where}: expected {{"prompt": TEXT}} or {{"messages": [...]}}')


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
