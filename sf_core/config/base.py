"""What every model of settings has in common: how it is read, written, and shown as a form."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


def _key(name: str, _: Any) -> str:
    """A field of the UI form is called what it is called here, in the YAML file and in messages."""
    return name


def _in_order(schema: dict[str, Any]) -> None:
    """Keep the UI form in the order written here; Prefect sorts fields alphabetically otherwise."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field.setdefault("position", position)


class Settings(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        # JSON has neither, and config.json, Prefect's API and its forms are JSON
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        field_title_generator=_key,
        json_schema_extra=_in_order,
    )
