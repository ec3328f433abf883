"""The JSON Schema of a configuration file, for editors. It accepts all that the loader accepts.

What only validators know, such as contradictions between settings, is not in it.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from sf_core.config import RunConfig
from sf_core.config.addresses import check_server_url
from sf_core.settings import REFERENCE, WORD, NameKind, is_reference, is_word

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PATTERNS = {is_reference: REFERENCE, is_word: WORD, check_server_url: "https?://[^@]*"}
"""What the text must match that these validators accept."""

# numbers and switches may be written as text too, in the forms that pydantic converts
_INTEGER = r"^\s*[+-]?[0-9][0-9_]*(\.0*)?\s*$"
_NUMBER = r"^\s*[+-]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][+-]?[0-9_]+)?\s*$"
_SWITCHES = ("0", "1", "off", "on", "f", "t", "false", "true", "n", "y", "no", "yes")


def settings_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a configuration file."""
    schema = _tidy(RunConfig.model_json_schema(schema_generator=_FileSchema))
    return {"$schema": DIALECT, "title": "Configuration of a SeamlessFlow run"} | schema


class _FileSchema(GenerateJsonSchema):
    """Allows the conversions of the loader, which pydantic's own schema does not know."""

    def int_schema(self, schema: Any) -> JsonSchemaValue:
        return super().int_schema(schema) | {"type": ["integer", "string", "boolean"], "pattern": _INTEGER}

    def float_schema(self, schema: Any) -> JsonSchemaValue:
        return super().float_schema(schema) | {"type": ["number", "string", "boolean"], "pattern": _NUMBER}

    def bool_schema(self, schema: Any) -> JsonSchemaValue:
        words = "|".join("".join(f"[{c}{c.upper()}]" for c in word) for word in _SWITCHES)
        number = {"minimum": 0, "maximum": 1, "multipleOf": 1}
        return {"type": ["boolean", "string", "number"], "pattern": f"^({words})$", **number}

    def literal_schema(self, schema: Any) -> JsonSchemaValue:
        allowed = schema["expected"]
        if not all(isinstance(value, int) for value in allowed):
            return super().literal_schema(schema)
        return {"enum": [*allowed, *(bool(value) for value in allowed if value in (0, 1))]}

    def function_after_schema(self, schema: Any) -> JsonSchemaValue:
        inner = super().function_after_schema(schema)
        pattern = _PATTERNS.get(schema["function"]["function"])
        return inner if pattern is None else inner | {"pattern": f"^({pattern})$"}

    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        inner = super().function_before_schema(schema)
        function = schema["function"]["function"]
        if not isinstance(function, NameKind):
            return inner
        kinds = {
            self.resolve_ref_schema(option)["properties"]["kind"]["default"]: option
            for option in inner.get("oneOf", [inner])
        }
        alone = [name for name, option in kinds.items() if "required" not in self.resolve_ref_schema(option)]
        named = [
            option if name == function.default else option | {"required": ["kind"]}
            for name, option in kinds.items()
        ]
        return {"anyOf": [{"enum": alone}] * bool(alone) + named}


def _tidy(schema: Any) -> Any:
    """The schema without what only forms read, and without keys that no pattern allows."""
    if not isinstance(schema, dict):
        return [_tidy(part) for part in schema] if isinstance(schema, list) else schema
    tidied: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs"):
            tidied[key] = {name: _tidy(part) for name, part in value.items()}
        elif key in ("default", "enum", "required"):
            tidied[key] = value
        elif key not in ("title", "position", "discriminator"):
            tidied[key] = _tidy(value)
    return tidied | ({"additionalProperties": False} if "patternProperties" in tidied else {})
