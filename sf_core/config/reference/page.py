"""All settings, described for users and their editors: a page of commented YAML, and the JSON Schema of a
configuration file.

The schema accepts all that the loader accepts. What only validators know, such as contradictions between
settings, is not in it.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import to_jsonable_python

from sf_core.config import RunConfig
from sf_core.config.addresses import check_server_url
from sf_core.config.validation import ConfigError, kinds_of, models_of, near_settings
from sf_core.settings import REFERENCE, WORD, NameKind, Settings, is_reference, is_word

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


PAGE_WIDTH = 110


def settings_page(path: str = "") -> str:
    """All settings, or the setting or section at this path, as commented YAML that loads as the default
    configuration. Raises ConfigError, one sentence with similar names, if there is no such setting."""
    lines = _part(path) if path else _section(RunConfig())
    return "\n".join(lines) + "\n"


def _part(path: str) -> Iterator[str]:
    """The part of the page at this path: within its sections as far as these are of one kind and not empty,
    else as comments, for each kind that has the setting."""
    # the name of a kind is explained with its section
    names = path.removesuffix(".kind").split(".")
    depth = 0
    settings: Settings = RunConfig()
    while len(names) > depth + 1 and isinstance(inner := getattr(settings, names[depth], None), Settings):
        if len(models_of(type(settings).model_fields[names[depth]].annotation)) > 1:
            break
        settings = inner
        depth = depth + 1
    if len(names) == depth + 1 and names[-1] in type(settings).model_fields:
        yield from (f"{'  ' * level}{name}:" for level, name in enumerate(names[:-1]))
        yield textwrap.indent("\n".join(_entry(settings, names[-1])), "  " * depth)
    elif lines := [*_describe([("", type(settings))], names[depth:], path)]:
        yield from lines
    else:
        raise _unknown(path)


def _describe(
    owners: Iterable[tuple[str, type[BaseModel]]], names: Sequence[str], path: str
) -> Iterator[str]:
    """What the setting at these names is, in each of these models, which are of the kinds before them."""
    name, *rest = names
    for kind, model in owners:
        if (field := model.model_fields.get(name)) is None:
            continue
        within = rest
        annotation = field.annotation
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
            within = rest[1:]
        if not within:
            yield from _comment(f"{path}{kind and f' of kind {kind}'}: {_tell(field)}")
        else:
            items = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
            models = [("", model) for model in models_of(items)]
            yield from _describe(kinds_of(items).items() or models, within, path)


def _tell(field: FieldInfo) -> str:
    """Description of a setting, with its default unless that is a section."""
    if field.is_required() or isinstance(field.default, Settings):
        return field.description or ""
    if field.default is None:
        return f"{field.description} Empty by default."
    return f"{field.description} By default {json.dumps(to_jsonable_python(field.default))}."


def _unknown(path: str) -> ConfigError:
    near = near_settings(path)
    hint = f"did you mean {' or '.join(near)}?" if near else "`sf settings` prints all settings"
    return ConfigError(f"{path}: unknown setting; {hint}")


def _section(settings: Settings) -> Iterator[str]:
    for number, name in enumerate(type(settings).model_fields):
        if number:
            yield ""
        yield from _entry(settings, name)


def _entry(settings: Settings, name: str) -> Iterator[str]:
    field = type(settings).model_fields[name]
    value = getattr(settings, name)
    plain = settings.model_dump(mode="json", include={name})
    section = value if isinstance(value, Settings) else None
    yield from _comment(field.description or inspect.getdoc(section) or "")
    yield from _other_kinds(field.annotation, section)
    for item in models_of(get_args(field.annotation)[1]) if get_origin(field.annotation) is dict else ():
        yield "# Settings of each entry:"
        for key, inner in item.model_fields.items():
            yield from _comment(f"{key}: {inner.description}", indent="  ")
    if section is None:
        # lists and inner mappings on a line of their own
        style = None if isinstance(plain[name], (list, dict)) else False
        dumped = yaml.safe_dump({name: plain[name]}, default_flow_style=style, sort_keys=False)
        yield dumped.rstrip("\n")
    else:
        yield f"{name}:"
        yield textwrap.indent("\n".join(_section(section)), "  ")


def _other_kinds(annotation: Any, chosen: Settings | None) -> Iterator[str]:
    """What a setting may be beside this: of another kind, as each in a list of them, or a section."""
    items = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
    absent = models_of(annotation) if chosen is None else []
    kinds = kinds_of(items).items() or [("", model) for model in absent]
    for kind, model in kinds:
        if not isinstance(chosen, model):
            yield from _comment(f"{kind and f'kind {kind}: '}{inspect.getdoc(model)}")
            yield from _fields(model, "  ")


def _fields(model: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name != "kind":
            yield from _comment(f"{name}: {_tell(field)}", indent)
            for inner in models_of(field.annotation):
                yield from _fields(inner, f"{indent}  ")


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"# {indent}"
    return textwrap.wrap(
        " ".join(text.split()),
        PAGE_WIDTH,
        initial_indent=start,
        subsequent_indent=start,
        break_on_hyphens=False,
    )
