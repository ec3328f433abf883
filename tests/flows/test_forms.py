"""The forms of our deployments in the Prefect UI are these schemas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from flows.evaluate import evaluate
from flows.sweep import sweep
from flows.train import train
from flows.warmstart import warmstart
from sf_core.config import RunConfig
from sf_core.sweeps.request import SweepRequest

ROOT = Path(__file__).parents[2]
BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}

flows = pytest.mark.parametrize("flow", [train, warmstart, evaluate, sweep], ids=lambda flow: flow.name)


def fields(flow: Flow[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of every section with its name; a section's own description counts for its field."""
    schema = parameter_schema(flow).model_dump_for_openapi()
    sections = {"": schema, **schema["definitions"]}
    for title, section in sections.items():
        for name, field in section["properties"].items():
            references = [part["$ref"] for part in [field, *field.get("allOf", [])] if "$ref" in part]
            described = [sections[reference.rsplit("/", 1)[1]] for reference in references]
            yield f"{title}.{name}", {**(described[0] if described else {}), **field}


def values(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas of a field's values: the alternatives, and the items of a list."""
    for alternative in field.get("anyOf", [field]):
        yield alternative
        yield from alternative.get("prefixItems", [])


@flows
def test_every_field_is_described_and_in_its_place(flow: Flow[Any, Any]) -> None:
    for name, field in fields(flow):
        # a kind is described as a whole
        assert field.get("description") or name.endswith(".kind"), name
        assert "position" in field, name


@flows
def test_a_field_is_called_as_in_the_configuration(flow: Flow[Any, Any]) -> None:
    for name, field in fields(flow):
        assert field["title"] == name.rpartition(".")[2]


@flows
def test_every_number_is_bounded(flow: Flow[Any, Any]) -> None:
    for name, field in fields(flow):
        for value in values(field):
            if value.get("type") in ("number", "integer"):
                assert (BOUNDS | {"enum"}) & value.keys(), name


def test_choices_are_offered_as_such() -> None:
    shown = dict(fields(train))
    for section in RunConfig.model_fields.values():
        for name, field in getattr(section.annotation, "model_fields", {}).items():
            if get_origin(field.annotation) is Literal:
                offered = shown[f"{section.annotation.__name__}.{name}"]["enum"]
                assert offered == list(get_args(field.annotation))


def test_sections_come_in_the_order_of_the_configuration() -> None:
    shown = [name for name, _ in fields(train) if name.startswith("RunConfig.")]
    assert shown == [f"RunConfig.{name}" for name in RunConfig.model_fields]


def test_the_deployed_sweep_can_be_begun_and_goes_on_with_a_retry(tmp_path: Path) -> None:
    described = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    [given] = [deployed["parameters"]["sweep"] for deployed in described if deployed["name"] == "sweep"]
    request = SweepRequest.model_validate(given | {"root": str(tmp_path)})
    begun = request.open()
    assert (begun.folder.name, len(begun.sweep.runs)) == ("quickstart-lr", 6)
    assert request.open() == begun
    # the name alone suffices to go on
    later = SweepRequest.model_validate({"config": None, "name": "quickstart-lr", "root": str(tmp_path)})
    assert later.open() == begun
    with pytest.raises(ValueError, match="a sweep needs a config to begin, or the name of a stored sweep"):
        SweepRequest(config=None).open()
