"""Environments by their names, and the functions of a run: those that its configuration names, else those of
its environment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from sf_core.agents.command import CommandAgent
from sf_core.agents.judges.judges import takes_judges
from sf_core.config import EnvironmentConfig
from sf_core.config.programs import Command
from sf_core.config.validation import faults
from sf_core.environments.environment import Environment, check_call, require_tasks
from sf_core.environments.splits import Split
from sf_core.process.import_path import ROOT
from sf_core.process.user_code import add_place
from sf_core.settings import load_object, quote
from sf_core.types import Task

SHIPPED = {
    "quickstart": "sf_core.environments.quickstart:Quickstart",
    "instructions": "sf_core.environments.instructions.environment:Instructions",
    "manners": "sf_core.environments.judged.manners:Manners",
    "prompts": "sf_core.environments.prompts:Prompts",
    "screen": "sf_core.environments.screen.environment:ScreenOfButtons",
    "repositories": "sf_core.environments.repositories.environment:Repositories",
    "reasoning_gym": "sf_core.environments.reasoning_gym:ReasoningGym",
    "verifiers": "sf_core.environments.verifiers:Verifiers",
    "mixture": "sf_core.environments.mixture:Mixture",
}
"""Classes by the short names of their environments. Each is imported when it is needed."""

REWARDS = ("reward", "group_reward")
"""Functions that may ask judges."""

EXAMPLES = {
    "programs": "examples.programs.environment:Programs",
    "repair": "examples.repair.environment:Repair",
}
"""The same for those that a checkout has and an installed package does not."""


def environment_of(config: EnvironmentConfig) -> Environment:
    """The environment that the settings name; one object for equal settings, because making held-out tasks
    takes time. Raises ValueError with one sentence if there is none or its settings are wrong."""
    return _open(config.name, TypeAdapter(dict).dump_json(config.settings))


def tasks_of(config: EnvironmentConfig) -> Callable[..., Task]:
    """The function that makes tasks, (split, index) -> Task. If the environment has parts, the name of one as
    third argument gives a task of it. It raises NoTaskError if it returns none. Raises ValueError like
    `environment_of`, also if there is no such function or a run cannot call it; so do the next two."""
    function = _function(config, "tasks", "split", "index")
    if parts_of(config):
        function = _with_parts(function, environment_of(config))
    return require_tasks(function, source_of(config, "tasks"))


def parts_of(config: EnvironmentConfig) -> list[str]:
    """Names of the parts among which a curriculum may choose; none if a function of the user's makes the
    tasks. Raises ValueError like `environment_of`."""
    return [] if config.tasks is not None else list(environment_of(config).sources)


def _with_parts(tasks: Callable[..., Any], environment: Environment) -> Callable[..., Any]:
    """The function that makes an environment's tasks, which takes the name of a part too."""

    @functools.wraps(tasks)
    def task(split: Split, index: int, source: str = "") -> Task:
        return environment.task(split, index, source)

    return task


def draw_tasks(config: EnvironmentConfig, split: str, indices: range) -> list[Task]:
    """The tasks before the first that cannot be made: there may be fewer, and sessions tell what is wrong."""
    tasks = tasks_of(config)
    drawn = list[Task]()
    with contextlib.suppress(Exception):
        drawn += (tasks(split, index) for index in indices)
    return drawn


def source_of_tasks(config: EnvironmentConfig) -> str:
    """The function that makes the tasks, as messages name it: "my_agent:tasks (my_agent.py:5)". Raises
    ValueError like `tasks_of`."""
    return add_place(source_of(config, "tasks"), tasks_of(config))


def agent_of(config: EnvironmentConfig) -> Callable[..., Any]:
    if isinstance(config.agent, Command):
        return _load("agent", config.agent, lambda command: CommandAgent(command).run)
    arguments = () if prepare_of(config) is None else ("prepared",)
    return _function(config, "agent", "task", "endpoint", *arguments)


def reward_of(config: EnvironmentConfig) -> Callable[..., Any]:
    return _function(config, "reward", "task", "answer")


def group_reward_of(config: EnvironmentConfig) -> Callable[..., Any] | None:
    """What scores the answers of a group together; None if each is scored by itself."""
    return None if config.group_reward is None else _function(config, "group_reward", "task", "answers")


def check_host(config: EnvironmentConfig) -> None:
    """Raises ValueError with one sentence if what the environment itself does cannot be done on this host."""
    if config.agent is not None and config.reward is not None:
        return
    if reason := environment_of(config).why_not_here():
        raise ValueError(f"environment.name: {config.name}: {reason}")


def prepare_of(config: EnvironmentConfig) -> Callable[[Task], AbstractAsyncContextManager[Any]] | None:
    """What prepares sessions for their agent; None if nothing does."""
    if config.prepare is not None or (config.agent is None and environment_of(config).prepares):
        return _function(config, "prepare", "task")
    if isinstance(config.agent, Command) and config.tasks is None:
        return functools.partial(_files, environment_of(config))
    return None


def _function(config: EnvironmentConfig, name: str, *arguments: str) -> Callable[..., Any]:
    """The function of a run that has this name, which can be called with these arguments."""
    reference = getattr(config, name)
    function = getattr(environment_of(config), name) if reference is None else _load(name, reference)
    judges = ["judges"] * (name in REWARDS and takes_judges(function))
    try:
        check_call(function, source_of(config, name), arguments, judges)
    except ValueError as error:
        raise ValueError(f"environment.{name if reference else 'name'}: {error}") from None
    return cast(Callable[..., Any], function)


def source_of(config: EnvironmentConfig, name: str) -> str:
    return getattr(config, name) or f"{config.name}.{name}"


@asynccontextmanager
async def _files(environment: Environment, task: Task) -> AsyncIterator[Mapping[str, bytes]]:
    yield await asyncio.to_thread(environment.files, task)


@functools.lru_cache(maxsize=8)
def _open(name: str, settings: bytes) -> Environment:
    environment_class = _class_of(name)
    try:
        return environment_class.model_validate_json(settings)
    except ValidationError as error:
        raise ValueError(faults(error, environment_class, "environment.settings")) from None


def _class_of(name: str) -> type[Environment]:
    named = SHIPPED | EXAMPLES
    reference = named.get(name, name)
    if ":" not in reference:
        raise ValueError(
            f"environment.name: unknown environment {quote(name)}; use one of {', '.join(named)}, or your "
            "own class as package.module:Class"
        )
    if name in EXAMPLES:
        _find_example(name)
    environment_class = _load("name", reference)
    if not (isinstance(environment_class, type) and issubclass(environment_class, Environment)):
        raise ValueError(
            f"environment.name: {reference} is not a class that inherits {Environment.__module__}.Environment"
        )
    if missing := ", ".join(sorted(environment_class.__abstractmethods__)):
        raise ValueError(f"environment.name: the class {reference} does not define {missing}")
    return environment_class


def _find_example(name: str) -> None:
    """Make an example of this checkout importable, from whatever folder the process was started. Raises
    ValueError, one sentence, if there is none."""
    if (ROOT / "examples").is_dir() and str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    module = EXAMPLES[name].partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that it is in
        spec = None
    if spec is None:
        raise ValueError(
            f"environment.name: {name} is an example, and its module {module} cannot be imported here: only "
            "a clone of SeamlessFlow's repository has it; add the clone to PYTHONPATH"
        )


def _load(setting: str, value: Any, load: Callable[[Any], Any] = load_object) -> Any:
    try:
        return load(value)
    except ValueError as error:
        raise ValueError(f"environment.{setting}: {error}") from error
