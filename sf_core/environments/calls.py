"""How a run calls the functions of its environment, and what is wrong with those that cannot be called so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import orjson

from sf_core.settings import quote
from sf_core.types import Task
from sf_core.user_code import add_place

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
        told = f"{add_place(source, function)} takes {signature}, but is called with ({called})"
        raise ValueError(f"{told}: {error}") from None


def require_tasks(function: Callable[..., Any], source: str) -> Callable[..., Task]:
    """The function, which raises NoTaskError, one sentence, where it gives no task. It is given the name of a
    part if it is called with one."""

    @functools.wraps(function)
    def tasks(split: str, index: int, *part: str) -> Task:
        given = function(split, index, *part)
        if fault := _fault_of(given):
            asked = ", ".join([f'"{split}"', str(index), *(f'"{name}"' for name in part)])
            raise NoTaskError(f"{add_place(source, function)} called with ({asked}) returned {fault}")
        return cast(Task, given)

    return tasks


def _fault_of(given: Any) -> str:
    """What was returned in place of a task, and what must be; empty if it is a task."""
    if inspect.iscoroutine(given):
        given.close()
        return f"a coroutine: the function must not be async, and must return {A_TASK}"
    if not isinstance(given, Task):
        return f"{quote(given)}, which is not a task: the function must return {A_TASK}"
    for name, value in (("task_id", given.task_id), ("environment", given.environment)):
        if not isinstance(value, str):
            return f"a task whose {name} is {quote(value)}, which is not a text"
    return ""


def find_difference(one: Task, other: Task) -> str:
    """The first field in which two tasks differ, with both values; empty if they are equal. Values of
    `metadata` that are not JSON are not compared."""
    for name in ("task_id", "environment", "prompt", "answer", "metadata"):
        values = getattr(one, name), getattr(other, name)
        if len(set(map(_comparable, values))) > 1:
            return f"{name} was {quote(values[0])} and then {quote(values[1])}"
    return ""


def find_same(some: Iterable[Task], others: Iterable[Task]) -> list[Task]:
    """The tasks of `some` whose content is that of one of `others`. Their ids are not compared."""

    def content(task: Task) -> bytes:
        return _comparable([task.environment, task.prompt, task.answer, task.metadata])

    known = {content(task) for task in others} - {b""}
    return [task for task in some if content(task) in known]


def _comparable(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS)
    except TypeError:
        return b""
