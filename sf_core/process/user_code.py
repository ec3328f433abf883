"""The user's own code and texts: the file and line of an error or of a function, and texts made safe for the
terminal.

Task ids, errors and file names may quote a model. A model samples anything, also what would set the
clipboard, the title or the colours of a terminal.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import logging
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sf_core.process.import_path import NAMES, ROOT

_OURS = tuple(ROOT / name for name in NAMES)
_PYTHON = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "scripts")})
"""Folders of Python itself, and of the installed programs, of which `sf` is one."""
_INSTALLED = {"site-packages", "dist-packages"}


def own_place(error: BaseException) -> str:
    """The innermost line of the user's own code that an error passed through, as "my_agent.py:12"; empty if
    there is none. For code that Python cannot read it is the line of that code. Of errors raised from one
    another the first counts."""
    places = itertools.chain.from_iterable(map(_places, reversed([*_causes(error)])))
    return next((_shorten(file, line) for file, line in places if is_own(file)), "")


def name_function(function: Callable[..., Any]) -> str:
    """A function as messages name it: "my_agent:reward (my_agent.py:8)"."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return add_place(f"{named.__module__}:{named.__qualname__}", function)


def add_place(name: str, function: Callable[..., Any]) -> str:
    """A function of this name, with its place."""
    place = place_of(function)
    return f"{name} ({place})" if place else name


def returns_nothing(function: Callable[..., Any]) -> bool:
    """Whether no line of the function returns a value, so that it returns None whatever happens. False if
    Python cannot tell."""
    while isinstance(function, functools.partial):
        function = function.func
    unwrapped: Any = inspect.unwrap(function)
    if not inspect.isroutine(unwrapped):
        return False
    try:
        [defined] = ast.parse(textwrap.dedent(inspect.getsource(unwrapped))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any(_gives_value(node) for node in _own_nodes(defined))


def _gives_value(node: ast.AST) -> bool:
    if isinstance(node, ast.Return):
        return not (node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None))
    return isinstance(node, ast.Yield | ast.YieldFrom)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without those of functions and classes that are defined inside."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(child)


def place_of(function: Callable[..., Any]) -> str:
    """Where a function is defined, as "my_agent.py:12"; empty if Python cannot tell."""
    while isinstance(function, functools.partial):
        function = function.func
    unwrapped: Any = inspect.unwrap(function)
    if not (inspect.isroutine(unwrapped) or inspect.isclass(unwrapped)):
        unwrapped = type(unwrapped)
    try:
        return _shorten(inspect.getsourcefile(unwrapped) or "", inspect.getsourcelines(unwrapped)[1])
    except (OSError, TypeError):
        return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    """Files and lines of an error, the innermost first."""
    if isinstance(error, SyntaxError):
        yield error.filename or "", error.lineno or 0
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        yield frame.filename, frame.lineno or 0


def is_own(file: str) -> bool:
    path = Path(file).resolve()
    if not path.is_file() or _INSTALLED & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in (*_OURS, *_PYTHON))


def _shorten(file: str, line: int) -> str:
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


# all control characters except the newline and the tab, marks that turn the direction of a line, and halves
# of characters, which no encoding can write
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def show(character: str) -> str:
    """The character as Python writes it: `\\x1b`."""
    return character.encode("unicode_escape").decode()


def printable(text: str) -> str:
    """The text with each character that steers a terminal shown; newlines and tabs stay."""
    return _STEERING.sub(lambda found: show(found[0]), text.replace("\r\n", "\n"))


def clean_logs() -> None:
    """Have every log record of this process, of whichever logger and handler, hold printable text."""
    logging.setLogRecordFactory(_CleanRecord)


class _CleanRecord(logging.LogRecord):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.exc_info and self.exc_info[0] is not None:
            # formatters use it instead of formatting the traceback themselves
            self.exc_text = printable("".join(traceback.format_exception(*self.exc_info))).rstrip("\n")

    def getMessage(self) -> str:
        return printable(super().getMessage())
