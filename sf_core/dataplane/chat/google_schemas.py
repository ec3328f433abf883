"""Names of fields and schemas as Google writes them, in the words of others."""

from __future__ import annotations

import functools
import re
from typing import Any

FORMATS = ("enum", "int32", "int64", "float", "double")
"""Formats of Google's schemas that say nothing in JSON."""

COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
"""Keys of schemas whose numbers Google writes as strings."""

MAX_NAME = 100
"""Characters of names that are spelled anew."""

_FREE = {
    "args",
    "response",
    "parameters",
    "parameters_json_schema",
    "response_schema",
    "response_json_schema",
    "chat_template_kwargs",
}
"""Fields whose values have names of the user's own."""


def spell(value: Any) -> Any:
    """A value with names of fields in one spelling."""
    if isinstance(value, list):
        return [spell(one) for one in value]
    if not isinstance(value, dict):
        return value
    named = {_underscore(name): inner for name, inner in value.items()}
    return {name: inner if name in _FREE else spell(inner) for name, inner in named.items()}


def _underscore(name: str) -> str:
    # longer than any field's; many of them would fill the cache with megabytes
    return name if len(name) > MAX_NAME else _underscored(name)


@functools.lru_cache(maxsize=1024)
def _underscored(name: str) -> str:
    return re.sub("[A-Z]", lambda capital: "_" + capital[0].lower(), name)


def json_schema(schema: Any) -> Any:
    """A schema as Google writes it in the words of JSON Schema, whose types have no capitals."""
    if isinstance(schema, list):
        return [json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    typed = {"type": schema["type"].lower()} if isinstance(schema.get("type"), str) else {}
    return {name: json_schema(value) for name, value in schema.items()} | typed


def exact(schema: Any) -> Any:
    """What such a schema says to Google besides: counts may be strings, null is a flag, formats of numbers
    say nothing, and an object has no more properties than are named."""
    if isinstance(schema, list):
        return [exact(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    said = {name: exact(value) for name, value in schema.items()}
    said |= {name: int(said[name]) for name in COUNTS & said.keys() if str(said[name]).isdecimal()}
    if said.get("format") in FORMATS:
        del said["format"]
    if said.get("type") == "object" and "properties" in said:
        said = {"additionalProperties": False} | said
    nullable = said.get("nullable") is True
    return {"anyOf": [said, {"type": "null"}]} if nullable else said
