"""Schemas as Google writes them, in JSON Schema."""

from __future__ import annotations

from typing import Any

FORMATS = ("enum", "int32", "int64", "float", "double")
"""Formats of Google's schemas that say nothing in JSON."""

COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
"""Keys of schemas whose numbers Google writes as strings."""


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
