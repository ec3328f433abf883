"""What an environment is: tasks, an agent that works on them, a reward, and demonstrations if it has some.

Its fields are its settings, as `environment.settings` gives them. registry.py knows those that are shipped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from sf_core.environments.splits import HasTasks, Split
from sf_core.settings import Settings, quote
from sf_core.types import Endpoint, Scored, Task

Reward = float | Mapping[str, float] | Scored


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate, in the form chat templates take."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class Environment(Settings):
    """Base class. `agent` and `reward` may be plain functions or async ones. A `reward` that asks judges has
    one more parameter, `judges`."""

    @abstractmethod
    def tasks(self, split: Split, index: int) -> Task:
        """A task; equal arguments give equal tasks, in every process."""

    @property
    def sources(self) -> Mapping[str, HasTasks]:
        """Its parts: where tasks come from, by the names that the stages of a curriculum may have shares of.
        Empty: there is one order of tasks, that of `tasks`."""
        return {}

    def task(self, split: Split, index: int, source: str = "") -> Task:
        """A task of a part; of `tasks` if no source is named. Raises ValueError if there is no such part."""
        if not source:
            return self.tasks(split, index)
        if source not in self.sources:
            there_are = f"its parts are {', '.join(self.sources)}" if self.sources else "it has no parts"
            raise ValueError(f"{type(self).__name__} has no part {quote(source)}; {there_are}")
        return self.sources[source].task(split, index)

    def prepare(self, task: Task) -> AbstractAsyncContextManager[Any]:
        """What the agent needs for a task and gets as its third argument. It is entered before the session
        runs and left when the agent has ended."""
        raise NotImplementedError

    @property
    def prepares(self) -> bool:
        return type(self).prepare is not Environment.prepare

    @abstractmethod
    def agent(self, task: Task, endpoint: Endpoint, *prepared: Any, **more: Any) -> Any:
        """Work on a task; returns the answer, a JSON value."""

    @abstractmethod
    def reward(self, task: Task, answer: Any) -> Reward | Awaitable[Reward]:
        """A number, or named parts whose sum is the reward."""

    def files(self, task: Task) -> Mapping[str, bytes]:
        """What a command as agent finds in its folder, by names of files."""
        return {}

    def demonstrate(self, index: int) -> Demonstration | None:
        """How to go about this training task, for the warm start of the built-in policy; None for a task that
        is not shown."""
        return None

    def why_not_here(self) -> str | None:
        """One sentence if agent or reward cannot run on this host, else None."""
        return None

    @property
    def classes(self) -> list[type[Environment]]:
        """Classes whose files decide what it demonstrates."""
        return [type(self)]

    @property
    def has_demonstrations(self) -> bool:
        return type(self).demonstrate is not Environment.demonstrate
