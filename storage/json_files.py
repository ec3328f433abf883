"""Reads JSON files of ours and files of JSON lines, and says why one cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def parse_json(kind: type[T], text: bytes, fault: str) -> T:
    """The value of this type that a JSON text holds. Raises ValueError, which begins with `fault` and says
    why, if it holds none."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{fault}: {first_fault(error)}") from None


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for a text that is no JSON, and for one that is nested too
    deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def first_fault(error: ValidationError) -> str:
    """The first error and, if it is in a field, the path of that field; one sentence without a full stop."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def json_lines(uri: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """The lines of a JSONL file that are not blank: the place of each (`FILE, line 3`) and its value. Raises
    ValueError with one sentence if one is no JSON."""
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield f"{uri}, line {number}", load_json(line)
            except ValueError as error:
                raise ValueError(f"{uri}, line {number}: not valid JSON: {error}") from None
