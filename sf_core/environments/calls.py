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
