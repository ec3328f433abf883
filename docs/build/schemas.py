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
}


def say_type(name: str, schema: Schema) -> str:
    """The type of the value with this name, in words."""
    forms = schema.get("anyOf") or schema.get("oneOf") or [schema]
    told = [_say(name, form) for form in forms if form.get("type") != "null"]
    if len(forms) > len(told):
        told.append("empty")
    return " or ".join(dict.fromkeys(told))


def _say(name: str, schema: Schema) -> str:
    if "$ref" in schema or "properties" in schema:
        return "section"
    if words := schema.get("enum"):
        return ("one of " if len(words) > 1 else "") + ", ".join(f"`{word}`" for word in words)
    match schema.get("type"):
        case "array":
            return _say_list(name, schema)
        case "object":
            values = schema.get("additionalProperties")
            of_sections = isinstance(values, dict) and say_type(name, values) == "section"
            return "mapping of names to sections" if of_sections else "mapping"
    text = _TYPES.get(schema.get("type", ""), "any value")
    bounds = [words.format(_number(schema[key])) for key, words in _BOUNDS.items() if key in schema]
    if "pattern" in schema and name in PATTERNS:
        bounds.append(PATTERNS[name].removeprefix("expected "))
    return f"{text} ({' and '.join(bounds)})" if bounds else text


def _say_list(name: str, schema: Schema) -> str:
    items = schema.get("prefixItems", [schema.get("items", {})])
    each = say_type(name, items[0]).removesuffix(" or section")
    least = schema.get("minItems", 0)
    most = schema.get("maxItems")
    number = f"{most} entries, " if least == most else "not empty, " if least else ""
    return "list of sections" if each == "section" else f"list ({number}each {each})"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def words_of(schema: Schema) -> list[Any]:
    """The words among which a value is chosen."""
    found = list(schema.get("enum", ()))
    for form in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        found += form.get("enum", ())
    return found
