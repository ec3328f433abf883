"""References to Python objects, written package.module:name: their form, and what they name."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import AfterValidator

from sf_core.config.words import shown


def _is_reference(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"expected package.module:name, got {shown(value)}")
    return value


Reference = Annotated[str, AfterValidator(_is_reference)]
"""Names Python code as package.module:name; it must be importable on the agent workers."""


def load_object(reference: str) -> Callable[..., Any]:
    """Import package.module:name. Raises ValueError with one sentence if that fails or the object is not
    callable."""
    module, _, name = reference.partition(":")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # whatever the user's own lines raise
        raise ValueError(f"{reference}: cannot import {module}: {described(error)}") from error
    try:
        found = getattr(imported, name)
    except AttributeError:
        raise ValueError(f"{reference}: module {module} has no {name}") from None
    if not callable(found):
        raise ValueError(f"{reference}: expected a function, got {type(found).__name__}")
    return cast(Callable[..., Any], found)


def described(error: Exception) -> str:
    """An error with the innermost line of module-level code that it passed through."""
    told = " ".join(f"{type(error).__name__}: {error}".split())
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f"{told}, {lines[-1].filename} line {lines[-1].lineno}" if lines else told
