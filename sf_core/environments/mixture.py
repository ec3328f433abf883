"""Several environments as one: each is a part, with tasks, an agent and a reward of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from sf_core.agents.event_loop import Threads
from sf_core.agents.judges.judges import takes_judges
from sf_core.agents.phases import as_reward
from sf_core.config import EnvironmentConfig
from sf_core.config.programs import Command
from sf_core.environments.environment import Demonstration, Environment, Reward
from sf_core.environments.registry import (
    agent_of,
    check_host,
    environment_of,
    prepare_of,
    reward_of,
    tasks_of,
)
from sf_core.environments.splits import HasTasks, Split, in_equal_parts
from sf_core.process.user_code import name_function
from sf_core.types import Endpoint, Task


@dataclass(frozen=True, slots=True)
class PartTask(Task):
    """A task of a part. Its environment is the name of the part, which its id begins with: two parts may be
    the same environment with other settings."""

    own: Task = field(kw_only=True, repr=False)
    """The task as the part made it, which its agent and its reward get."""


class _Part:
    """A joined environment, by its functions."""

    def __init__(self, name: str, config: EnvironmentConfig) -> None:
        self.name = name
        self._config = config
        self.tasks = tasks_of(config)
        self.reward = reward_of(config)
        self.prepare = prepare_of(config)
        self.reward_name = name_function(self.reward)
        self.environment = None if config.tasks is not None else environment_of(config)
        """What has its files and demonstrations; None if its tasks are made by a function of the user's."""

    @cached_property
    def agent(self) -> Callable[..., Any]:
        # a program and a sandbox need not be where others score
        return agent_of(self._config)

    def task(self, split: Split, index: int) -> PartTask:
        own = self.tasks(split, index)
        name = f"{self.name}/{own.task_id}"
        return PartTask(name, self.name, own.prompt, own.answer, own.metadata, own=own)

    def why_not_here(self) -> str | None:
        try:
            check_host(self._config)
            self.agent  # noqa: B018, a command that is not here is refused
        except ValueError as error:
            return f"part {self.name}: {_within(error)}"
        return None


def _within(error: ValueError) -> str:
    """What is wrong with an environment, told from inside its part."""
    return re.sub(r"(?<![\w.])environment\.(?=name|settings|tasks|agent|reward|prepare)", "", str(error))


def _can_be_joined(config: EnvironmentConfig) -> EnvironmentConfig:
    try:
        _Part("", config)
        if not isinstance(config.agent, Command):
            agent_of(config)
        is_own = None not in (config.tasks, config.agent, config.reward)
        if not is_own and isinstance(environment_of(config), Mixture):
            raise ValueError("a mixture cannot contain another mixture: list all parts in the outer mixture")
        if config.group_reward is not None:
            raise ValueError(
                "group_reward: a part cannot have its own group_reward; set environment.group_reward"
            )
        if config.judges:
            raise ValueError("judges: a part cannot have its own judges; set environment.judges")
    except ValueError as error:
        raise ValueError(_within(error)) from None
    return config


class Mixture(Environment):
    """Several environments, called parts, on which one run trains. The parts take turns, or
    `rollout.curriculum.stages` gives the share of each part."""

    parts: dict[str, Annotated[EnvironmentConfig, AfterValidator(_can_be_joined)]] = Field(min_length=1)
    """The parts, by names of your choice. Each part is written like the section `environment`: a name and
    settings, or functions of your own."""

    @field_validator("parts")
    @classmethod
    def _are_named(cls, parts: dict[str, EnvironmentConfig]) -> dict[str, EnvironmentConfig]:
        if "" in parts:
            raise ValueError("a part of a mixture needs a name")
        return parts

    @cached_property
    def _parts(self) -> dict[str, _Part]:
        return {name: _Part(name, config) for name, config in self.parts.items()}

    @property
    def _joined(self) -> list[Environment]:
        return [part.environment for part in self._parts.values() if part.environment is not None]

    @cached_property
    def _threads(self) -> Threads:
        return Threads()

    @property
    def sources(self) -> Mapping[str, HasTasks]:
        return self._parts

    @property
    def classes(self) -> list[type[Environment]]:
        return [type(self), *map(type, self._joined)]

    def tasks(self, split: Split, index: int) -> Task:
        return in_equal_parts(self.sources, split, index)

    @property
    def prepares(self) -> bool:
        return any(part.prepare is not None for part in self._parts.values())

    def prepare(self, task: Task) -> AbstractAsyncContextManager[Any]:
        part, own = self._origin(task)
        return nullcontext() if part.prepare is None else part.prepare(own)

    async def agent(self, task: Task, endpoint: Endpoint, *prepared: Any) -> Any:
        part, own = self._origin(task)
        arguments = () if part.prepare is None else prepared
        return await self._threads.call(part.agent, own, endpoint, *arguments)

    async def reward(self, task: Task, answer: Any, judges: Any = None) -> Reward:
        part, own = self._origin(task)
        asks = judges is not None and takes_judges(part.reward)
        reward = partial(part.reward, judges=judges) if asks else part.reward
        earned: Reward = await self._threads.call(reward, own, answer)
        # refused here, by the name of the part's function
        as_reward(earned, part.reward_name)
        return earned

    def files(self, task: Task) -> Mapping[str, bytes]:
        part, own = self._origin(task)
        return {} if part.environment is None else part.environment.files(own)

    def demonstrate(self, index: int) -> Demonstration | None:
        parts = [*self._parts.values()]
        environment = parts[index % len(parts)].environment
        return None if environment is None else environment.demonstrate(index // len(parts))

    @property
    def has_demonstrations(self) -> bool:
        return any(environment.has_demonstrations for environment in self._joined)

    def why_not_here(self) -> str | None:
        return next(filter(None, (part.why_not_here() for part in self._parts.values())), None)

    def _origin(self, task: Task) -> tuple[_Part, Task]:
        """The part that a task is of, and the task as that made it."""
        if not isinstance(task, PartTask):
            raise ValueError(f"task {task.task_id} belongs to none of the parts {', '.join(self._parts)}")
        return self._parts[task.environment], task.own
