"""Base class of all models of settings: how they are read, written, and shown as a form."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


def _key(name: str, _: Any) -> str:
    """Label a field of the UI form with the name that it has in the YAML file and in messages."""
    return name


def _as_form(schema: dict[str, Any]) -> None:
    """Keep the UI form in the order written here, because Prefect sorts fields alphabetically otherwise, and
    offer a name as a choice also while there is only one."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field.setdefault("position", position)
        if "const" in field:
            field["enum"] = [field.pop("const")]


class Settings(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        # config.json, Prefect's API and its forms are JSON, which has no infinity and no NaN
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        field_title_generator=_key,
        json_schema_extra=_as_form,
    )
