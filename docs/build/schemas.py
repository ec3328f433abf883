"""Types of JSON Schemas in words."""

from __future__ import annotations

from typing import Any

from sf_core.config.validation import PATTERNS

Schema = dict[str, Any]

_TYPES = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "multipleOf": "a multiple of {}",
    "minItems": "at least {} in number",
    "maxItems": "at most {} in number",
}


def say_type(name: str, schema: Schema) -> str:
    """What the value of this name may be, in words."""
    forms = schema.get("anyOf") or schema.get("oneOf") or [schema]
    told = [_form(name, form) for form in forms if form.get("type") != "null"]
    if len(forms) > len(told):
        told.append("empty")
    text = " or ".join(dict.fromkeys(told))
    return text[:1].upper() + text[1:]


def _form(name: str, schema: Schema) -> str:
    if "$ref" in schema or "properties" in schema:
        return "section"
    if words := words_of(schema):
        return ("one of " if len(words) > 1 else "") + ", ".join(f"`{word}`" for word in words)
    if schema.get("type") == "array":
        items = schema.get("items", {})
        inner = say_type(name, items).lower()
        text = "list of sections" if inner.startswith("section") else f"list, each {inner}"
    elif schema.get("type") == "object":
        values = schema.get("additionalProperties")
        inner = say_type(name, values).lower() if isinstance(values, dict) else ""
        text = "mapping of names to sections" if inner.startswith("section") else "mapping"
    else:
        text = _TYPES.get(schema.get("type", ""), "any value")
    if "pattern" in schema and name in PATTERNS:
        text += f" ({PATTERNS[name].removeprefix('expected ')})"
    bounds = [words.format(f"{schema[key]:,}") for key, words in _BOUNDS.items() if key in schema]
    return " ".join((text, " and ".join(bounds))).rstrip()


def words_of(schema: Schema) -> list[Any]:
    """The words among which a value is chosen."""
    found = list(schema.get("enum", ()))
    for form in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        found += form.get("enum", ())
    return found
