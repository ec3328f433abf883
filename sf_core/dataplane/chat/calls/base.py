"""What the formats of tool calls share: calls that begin with a mark are found anywhere in an answer that
arrives in pieces, and values that a call holds as text are read by the schema of the tool, as vLLM reads
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sf_core.dataplane.chat.json_text import read_json
from sf_core.dataplane.chat.tool_formats import Parts, ToolCall, overlap

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"


class ParsedCalls(NamedTuple):
    length: int
    """Length of the text of the calls."""
    calls: list[ToolCall] | None
    """None: the text is not a call."""


Read = Callable[[str, bool], ParsedCalls | None]
"""Parses the calls with which a text begins; None: the result depends on later text. The flag tells that no
more text will come."""


class MarkedCalls:
    """If `read` returns a result for a text, it must return the same result for every longer text."""

    def __init__(self, read: Read, *marks: str, closing: str = "") -> None:
        """`closing`: each call ends with one of these characters, so a text without them need not be
        parsed."""
        self._read = read
        self._marks = marks
        self._closing = closing
        self._text = ""
        self.num_unparsed = 0

    def push(self, text: str) -> Parts:
        was_open = self._text.startswith(self._marks)
        self._text += text
        if was_open and self._closing and not any(character in text for character in self._closing):
            return []
        return self._split(is_whole=False)

    def finish(self) -> Parts:
        parts = self._split(is_whole=True)
        parts.append(self._text)
        self._text = ""
        return parts

    def _split(self, *, is_whole: bool) -> Parts:
        parts: Parts = []
        while (start := self._find_mark()) is not None:
            parts.append(self._text[:start])
            self._text = self._text[start:]
            result = self._read(self._text, is_whole)
            if result is None:
                return parts
            length, calls = result
            self.num_unparsed += calls is None
            parts += [self._text[:length]] if calls is None else calls
            self._text = self._text[length:]
        # a mark may begin at the end of the text
        certain = len(self._text) - max(overlap(self._text, mark) for mark in self._marks)
        parts.append(self._text[:certain])
        self._text = self._text[certain:]
        return parts

    def _find_mark(self) -> int | None:
        return min((at for mark in self._marks if (at := self._text.find(mark)) >= 0), default=None)


def read_between_tags(parse: Callable[[str], ToolCall | None], *, shows_end: bool = False) -> Read:
    """A parser of calls between `<tool_call>` and `</tool_call>`. `shows_end`: an incomplete call does not
    parse, so the last call needs no closing tag."""

    def read(text: str, is_whole: bool) -> ParsedCalls | None:
        if (end := text.find(CALL_END)) >= 0:
            length = end + len(CALL_END)
            inside = text[len(CALL_START) : end]
        elif not is_whole:
            return None
        elif shows_end:
            length = len(text)
            inside = text[len(CALL_START) : len(text) - overlap(text, CALL_END)]
        else:
            return ParsedCalls(len(text), None)
        call = parse(inside)
        return ParsedCalls(length, None if call is None else [call])

    return read


def parse_value(text: str, schema: Any) -> Any:
    kinds = {_ALIASES.get(kind, kind) for kind in map(str.lower, _types(schema))}
    for kind, convert in _CONVERSIONS.items():
        if kind in kinds:
            try:
                return convert(text)
            except (ValueError, KeyError):
                continue
    if "string" in kinds:
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def format_value(value: Any) -> str:
    """The text of a value in a call."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return {"string"}
    named = schema.get("type") or []
    if isinstance(named, str):
        named = [named]
    types = {name for name in named if isinstance(name, str)}
    types |= {_JSON_TYPES[type(value)] for value in schema.get("enum") or () if type(value) in _JSON_TYPES}
    for choice in ("anyOf", "oneOf", "allOf"):
        types = types.union(*map(_types, schema.get(choice) or ()))
    return types or {"string"}


_JSON_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_ALIASES = (
    dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string")
    | dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64"), "integer")
    | dict.fromkeys(("long", "short", "unsigned"), "integer")
    | dict.fromkeys(("float", "float32", "float64", "double"), "number")
    | {"bool": "boolean", "dict": "object"}
    | dict.fromkeys(("arr", "list", "sequence"), "array")
)


def _integer(text: str) -> Any:
    return read_json(str(int(text)))


def _number(text: str) -> int | float:
    # integers stay integers: a float would round a long one
    try:
        return _integer(text)
    except ValueError:
        value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return _integer(f"{value:.0f}") if value.is_integer() else value


_CONVERSIONS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: {"null": None}[text.lower()],
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower().strip()],
    "object": read_json,
    "array": read_json,
}
"""In the order in which they are tried."""
