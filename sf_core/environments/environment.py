"""What an environment is: tasks, an agent that works on them, a reward, and demonstrations if it has some.
Also how a run calls these functions, and what is wrong with functions that cannot be called so.

The fields of an environment are its settings, as `environment.settings` gives them. registry.py knows the
environments that are shipped.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, cast

import orjson

from sf_core.environments.splits import HasTasks, Split
from sf_core.process.user_code import add_place
from sf_core.settings import Settings, quote
from sf_core.types import Endpoint, Scored, Task

A_TASK = "sf_core.types.Task(task_id, environment, prompt)"


class NoTaskError(ValueError):
    """What a function returned is no task."""


def check_call(
    function: Callable[..., Any], source: str, arguments: Sequence[str], named: Sequence[str] = ()
) -> None:
    """Raises ValueError with one sentence if the function cannot be called with these arguments, and these by
    their names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in another language
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError as error:
        called = ", ".join([*arguments, *named])
        mismatch = f"{add_place(source, function)} takes {signature}, but is called with ({called})"
        raise ValueError(f"{mismatch}: {error}") from None


def require_tasks(function: Callable[..., Any], source: str) -> Callable[..., Task]:
    """The function, which raises NoTaskError, one sentence, where it gives no task. It is given the name of a
    part if it is called with one."""

    @functools.wraps(function)
    def tasks(split: str, index: int, *part: str) -> Task:
        returned = function(split, index, *part)
        if fault := _fault_of(returned):
            call = ", ".join([f'"{split}"', str(index), *(f'"{name}"' for name in part)])
            raise NoTaskError(f"{add_place(source, function)} called with ({call}) returned {fault}")
        return cast(Task, returned)

    return tasks


def _fault_of(returned: Any) -> str:
    """What was returned in place of a task, and what must be; empty if it is a task."""
    if inspect.iscoroutine(returned):
        returned.close()
        return f"a coroutine: the function must not be async, and must return {A_TASK}"
    if not isinstance(returned, Task):
        return f"{quote(returned)}, which is not a task: the function must return {A_TASK}"
    for name, value in (("task_id", returned.task_id), ("environment", returned.environment)):
        if not isinstance(value, str):
            return f"a task whose {name} is {quote(value)}, which is not a text"
    return ""


def find_difference(first: Task, second: Task) -> str:
    """The first field in which two tasks differ, with both values; empty if they are equal. Values of
    `metadata` that are not JSON are not compared."""
    for name in ("task_id", "environment", "prompt", "answer", "metadata"):
        values = getattr(first, name), getattr(second, name)
        if len(set(map(_comparable, values))) > 1:
            return f"{name} was {quote(values[0])} and then {quote(values[1])}"
    return ""


def find_same(tasks: Iterable[Task], held_out: Iterable[Task]) -> list[Task]:
    """The tasks of `some` whose content is that of one of `others`. Their ids are not compared."""

    def content(task: Task) -> bytes:
        return _comparable([task.environment, task.prompt, task.answer, task.metadata])

    held_out_contents = {content(task) for task in held_out} - {b""}
    return [task for task in tasks if content(task) in held_out_contents]


def _comparable(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS)
    except TypeError:
        return b""


Reward = float | Mapping[str, float] | Scored


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation that the built-in policy imitates in its warm start, before reinforcement learning."""

    messages: list[dict[str, Any]]
    """The messages in OpenAI's form. The policy learns to write the messages with the role `assistant`."""
    tools: list[dict[str, Any]] | None = None
    """The tools that the model sees, in OpenAI's form. `Tool.schema` is a tool in this form."""


class Environment(Settings):
    """Base class for environments. An environment defines tasks, an agent and a reward function. The fields
    of your class are settings: in YAML, `environment.settings` contains their values. The methods `agent` and
    `reward` may be async.

    ```python
    class Sums(Environment):
        most: int = 99  # environment.settings.most

        def tasks(self, split: Split, index: int) -> Task:
            a = Random(f"{split} {index}").randint(1, self.most)
            return Task(f"{split}-{index}", "sums", f"What is {a}+{a}?", answer=str(2 * a))

        async def agent(self, task: Task, endpoint: Endpoint) -> str:
            return await run_tool_loop(endpoint, task.prompt)

        def reward(self, task: Task, answer: str) -> float:
            return float(answer.strip() == task.answer)
    ```
    """

    @abstractmethod
    def tasks(self, split: Split, index: int) -> Task:
        """Make the task with the number `index`, which starts at 0. `split` is `train` or `holdout`. In every
        process, equal arguments must give equal tasks."""

    @property
    def sources(self) -> Mapping[str, HasTasks]:
        """Optional: the parts of the environment, by name. A curriculum can set the share of the tasks that
        come from each part. Empty: all tasks come from `tasks`."""
        return {}

    def task(self, split: Split, index: int, source: str = "") -> Task:
        """Make a task of the part `source`. If `source` is empty, the task comes from `tasks`. Raises
        ValueError if the environment has no part with this name."""
        if not source:
            return self.tasks(split, index)
        if source not in self.sources:
            there_are = f"its parts are {', '.join(self.sources)}" if self.sources else "it has no parts"
            raise ValueError(f"{type(self).__name__} has no part {quote(source)}; {there_are}")
        return self.sources[source].task(split, index)

    def prepare(self, task: Task) -> AbstractAsyncContextManager[Any]:
        """Optional: prepare a resource that the agent needs for a task, for example a sandbox. Return an
        async context manager. SeamlessFlow enters the context manager before the agent starts, and exits the
        context manager after the agent has ended. The value from entering the context manager is the third
        argument of `agent`."""
        raise NotImplementedError

    @property
    def prepares(self) -> bool:
        return type(self).prepare is not Environment.prepare

    @abstractmethod
    def agent(self, task: Task, endpoint: Endpoint, *prepared: Any, **more: Any) -> Any:
        """Work on a task with the LLM at `endpoint`. Return the answer, which must be a JSON value. If
        `agent` raises an error, the session fails, and `rollout.on_failure` decides what happens."""

    @abstractmethod
    def reward(self, task: Task, answer: Any) -> Reward | Awaitable[Reward]:
        """Score an answer. Return a finite number, a mapping of named parts whose sum is the reward, or a
        `Scored`. To use judges, add a parameter `judges`. Raise NotJudged if the answer cannot be scored
        now."""

    def files(self, task: Task) -> Mapping[str, bytes]:
        """Optional: files for the working folder of a command as agent. Each key is the name of a file."""
        return {}

    def demonstrate(self, index: int) -> Demonstration | None:
        """Optional: a solution of the training task `index`, for the warm start of the built-in policy.
        Return None if the task has no demonstration."""
        return None

    def why_not_here(self) -> str | None:
        """Optional: check whether the agent and the reward function can run on this host. Return None if they
        can run. If they cannot run, return one sentence with the reason."""
        return None

    @property
    def classes(self) -> list[type[Environment]]:
        """Classes whose files decide what it demonstrates."""
        return [type(self)]

    @property
    def has_demonstrations(self) -> bool:
        return type(self).demonstrate is not Environment.demonstrate
