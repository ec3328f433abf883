"""Conversion of arguments that a call holds as text, by the schema of the tool, as in vLLM.

The types of a schema are tried in a fixed order. A text that fits no type is parsed as JSON, or stays text. A
text without a known type stays text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from sf_core.dataplane.chat.json_text import read_json


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
