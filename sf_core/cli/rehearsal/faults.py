"""Which errors of a session every other session would have too, whatever the policy answers."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from types import BuiltinFunctionType, CoroutineType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from sf_core.agents.phases import LateError
from sf_core.types import Endpoint, NotJudged, Task
from sf_core.user_code import is_own, returns_nothing

_NO_ANSWERS = (
    *(ModuleType, FunctionType, MethodType, BuiltinFunctionType, CoroutineType, type),
    *(Task, Endpoint),
)
"""Types of values that no answer decides."""


def is_certain(error: BaseException, has_answer: bool) -> bool:
    """Whether the error does not depend on an answer. Before the policy has given one, no error does. After
    that an agent may raise anything because it cannot use the scripted answer; certain are only names,
    modules and attributes that a line of the user's own code names and that do not exist."""
    if isinstance(error, LateError | TimeoutError | NotJudged):
        return False
    if not has_answer:
        return True
    if isinstance(error, SyntaxError):
        return is_own(error.filename or "")
    frame = _innermost(error)
    # code of the policy's that `exec` runs has no file
    if frame is None or not is_own(frame.f_code.co_filename):
        return False
    name = str(getattr(error, "name", None))
    # a name that the line itself has: `getattr` may be given one by the policy
    is_written = any(word == name or word.startswith(f"{name}.") for word in frame.f_code.co_names)
    if isinstance(error, UnboundLocalError):
        return False
    if isinstance(error, AttributeError):
        return is_written and isinstance(error.obj, _NO_ANSWERS)
    return is_written and isinstance(error, NameError | ImportError)


def is_certain_of_scoring(
    error: BaseException, agent: Callable[..., Any], reward: Callable[..., Any], answer: Any
) -> bool:
    """The same of an error while an answer of the agent was scored, which may also be that a `return` is
    missing."""
    if isinstance(error, LateError | TimeoutError | NotJudged):
        return False
    lacks_return = returns_nothing(reward) or (answer is None and returns_nothing(agent))
    return lacks_return or is_certain(error, has_answer=True)


def _innermost(error: BaseException) -> FrameType | None:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1] if frames else None
