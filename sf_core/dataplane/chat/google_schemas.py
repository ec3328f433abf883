"""Conversion of Google's field names to snake case, and of Google's schemas to JSON Schema."""

from __future__ import annotations

import functools
import re
from typing import Any

FORMATS = ("enum", "int32", "int64", "float", "double")
"""Formats of Google's schemas that have no meaning in JSON Schema."""

COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
"""Keys of schemas whose numbers Google writes as strings."""

MAX_NAME = 100
"""Most characters of a name that is converted."""

_WITH_FREE_NAMES = {
    "args",
    "response",
    "parameters",
    "parameters_json_schema",
    "response_schema",
    "response_json_schema",
    "chat_template_kwargs",
}
"""Fields whose values contain names of the user's own, which are not converted."""


def to_snake_case(value: Any) -> Any:
    """A value with all field names in snake case."""
    if isinstance(value, list):
        return [to_snake_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {_snake_case(name): inner for name, inner in value.items()}
    return {
        name: inner if name in _WITH_FREE_NAMES else to_snake_case(inner) for name, inner in renamed.items()
    }


def _snake_case(name: str) -> str:
    # a longer name is no field, and many of them would fill the cache with megabytes
    return name if len(name) > MAX_NAME else _convert_to_snake_case(name)


@functools.lru_cache(maxsize=1024)
def _convert_to_snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda capital: "_" + capital[0].lower(), name)


def json_schema(schema: Any) -> Any:
    """A schema of Google's as JSON Schema, whose types are lower case."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    lower_type = {"type": schema["type"].lower()} if isinstance(schema.get("type"), str) else {}
    return {name: json_schema(value) for name, value in schema.items()} | lower_type


def to_strict_schema(schema: Any) -> Any:
    """A converted schema with Google's meaning: counts may be strings, null is a flag, formats of numbers are
    ignored, and an object has no other properties than the named ones."""
    if isinstance(schema, list):
        return [to_strict_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {name: to_strict_schema(value) for name, value in schema.items()}
    for name in COUNTS & converted.keys():
        if str(converted[name]).isdecimal():
            converted[name] = int(converted[name])
    if converted.get("format") in FORMATS:
        del converted["format"]
    if converted.get("type") == "object" and "properties" in converted:
        converted = {"additionalProperties": False} | converted
    is_nullable = converted.get("nullable") is True
    return {"anyOf": [converted, {"type": "null"}]} if is_nullable else converted
