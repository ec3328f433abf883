"""The form of a deployment in the Prefect UI: the settings that people change first, and all of them folded.

The form is the JSON Schema of a flow's parameter. Prefect's server checks each run that is submitted against
the schema, so the schema accepts all that a configuration may hold, and the form shows only a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from sf_core.config import RunConfig
from sf_core.config.yaml_file import find_differences, merge_sections

ALL = "all_settings"
"""Name of the folded part of the form."""

TOLD = (
    "Every setting, for what the fields above do not have. A value that equals its default changes nothing. "
    "Another value overrides the deployment, and the field above. None: nothing is changed here."
)

OPEN = "change"
"""Button that unfolds a section."""


class Form:
    """Metadata of a flow's parameter of type RunConfig: the form of the parameter."""

    def __init__(self, *first: str) -> None:
        """`first`: keys of the settings that are not folded, for example `run_id` or `train.iterations`."""
        self._first: dict[str, list[str]] = {}
        for key in first:
            section, _, name = key.partition(".")
            self._first.setdefault(section, []).extend([name] if name else [])

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        run = handler.resolve_ref_schema(handler(core_schema))
        shown = {}
        for name, inner in self._first.items():
            field = _make_plain(run["properties"][name])
            if inner:
                section = handler.resolve_ref_schema(field)
                fields = {key: _make_plain(section["properties"][key]) for key in inner}
                field = _show_only(section, fields) | {"title": name}
            shown[name] = field
        return _show_only(run, shown | {ALL: _fold(run, handler)})


def unfold(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a form or another caller gives, in the shape of a configuration and not validated."""
    above = {name: value for name, value in given.items() if name != ALL}
    return merge_sections(above, _find_changes(given.get(ALL) or {}))


def _find_changes(folded: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the defaults, since the form sends all settings of a section that was unfolded."""
    default = RunConfig().model_dump(mode="json")
    opened = {name: value for name, value in folded.items() if value is not None or default.get(name) is None}
    changes: dict[str, Any] = {}
    for key, _, value in find_differences(default, opened):
        *sections, name = key.split(".")
        section_changes = changes
        for section in sections:
            section_changes = section_changes.setdefault(section, {})
        section_changes[name] = value
    return changes


def _show_only(section: JsonSchemaValue, shown: Mapping[str, JsonSchemaValue]) -> JsonSchemaValue:
    """The section with these fields, in this order. The form shows no fields of patterns, but the server
    accepts them."""
    hidden = {f"^{name}$": field for name, field in section["properties"].items() if name not in shown}
    return {
        "type": "object",
        "title": section["title"],
        "description": section["description"],
        "properties": {name: field | {"position": at} for at, (name, field) in enumerate(shown.items())},
        "patternProperties": hidden,
        "additionalProperties": False,
    }


def _make_plain(field: JsonSchemaValue) -> JsonSchemaValue:
    """A field that may be empty as one that is empty at first. Otherwise it has a button for None."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1 or "$ref" in kinds[0]:
        return field
    return kinds[0] | {name: field[name] for name in ("title", "description")}


def _fold(run: JsonSchemaValue, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    """All settings, which are None until somebody unfolds them, and so is each section of them."""
    fields = {}
    for name, field in run["properties"].items():
        if "$ref" in field:
            section = handler.resolve_ref_schema(field)
            presentation = {
                "title": name,
                "description": section["description"],
                "position": field["position"],
            }
            field = _or_none(section | {"title": OPEN}) | presentation
        fields[name] = field
    opened = {"type": "object", "title": OPEN, "properties": fields, "additionalProperties": False}
    return _or_none(opened) | {"title": ALL, "description": TOLD}


def _or_none(schema: JsonSchemaValue) -> JsonSchemaValue:
    return {"anyOf": [schema, {"type": "null"}], "default": None}
