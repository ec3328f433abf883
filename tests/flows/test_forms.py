"""The forms of our deployments in the Prefect UI are these schemas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from pydantic import TypeAdapter

from flows.evaluate import evaluate
from flows.sweep import sweep
from flows.train import train
from flows.warmstart import warmstart
from sf_core.config import RunConfig
from sf_core.config.reference.form import unfold
from sf_core.config.yaml_file import load_config
from sf_core.stages.sweeps.expansion import SweepRequest
from tasks.deployed import TrainForm
from tests.bench import ROOT

BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}

RUN_FLOWS = [train, warmstart, evaluate]

of_runs = pytest.mark.parametrize("flow", RUN_FLOWS, ids=lambda flow: flow.name)
flows = pytest.mark.parametrize("flow", [*RUN_FLOWS, sweep], ids=lambda flow: flow.name)


@cache
def schema_of(flow: Flow[Any, Any]) -> dict[str, Any]:
    return parameter_schema(flow).model_dump_for_openapi()


def config_of(flow: Flow[Any, Any]) -> dict[str, Any]:
    """The schema of the form itself, without definitions."""
    config: dict[str, Any] = schema_of(flow)["properties"]["config"]
    return config


def folded(flow: Flow[Any, Any]) -> dict[str, dict[str, Any]]:
    """The fields of the folded part, by name."""
    opened, empty = config_of(flow)["properties"]["all_settings"]["anyOf"]
    assert empty == {"type": "null"}
    properties: dict[str, dict[str, Any]] = opened["properties"]
    return properties


def fields(flow: Flow[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of every section with its name; a section's own description counts for its field."""
    schema = schema_of(flow)
    sections = {"": schema, **schema["definitions"]}
    if flow in RUN_FLOWS:
        sections |= {"config": config_of(flow), "all_settings": {"properties": folded(flow)}}
        sections |= {f"config.{name}": section for name, section in config_of(flow)["properties"].items()}
        sections |= {
            f"all_settings.{name}": field.get("anyOf", [{}])[0] for name, field in folded(flow).items()
        }
    for title, section in sections.items():
        for name, field in section.get("properties", {}).items():
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
    for title, section in RunConfig.model_fields.items():
        for name, field in getattr(section.annotation, "model_fields", {}).items():
            if get_origin(field.annotation) is Literal:
                offered = shown[f"all_settings.{title}.{name}"]["enum"]
                assert offered == list(get_args(field.annotation))


def test_sections_come_in_the_order_of_the_configuration() -> None:
    shown = sorted(folded(train), key=lambda name: folded(train)[name]["position"])
    assert shown == [*RunConfig.model_fields]


@pytest.mark.parametrize(
    ("flow", "names"),
    [
        (
            train,
            [
                *("run_id", "train.iterations", "train.learning_rate", "policy.model"),
                *(f"environment.{name}" for name in ("name", "tasks", "agent", "reward")),
            ],
        ),
        (warmstart, ["run_id", "policy.model", "policy.warmstart", "environment.name"]),
        (evaluate, ["run_id", "evaluate.num_tasks", "storage.root"]),
    ],
    ids=lambda value: value.name if isinstance(value, Flow) else "",
)
def test_the_settings_that_people_change_first_come_first_and_the_others_are_folded(
    flow: Flow[Any, Any], names: list[str]
) -> None:
    first = []
    for name, field in config_of(flow)["properties"].items():
        first += [f"{name}.{inner}" for inner in field.get("properties", {})] or [name]
    assert first == [*names, "all_settings"]
    for name, field in folded(flow).items():
        assert field["default"] in (None, 0), f"{name} is not folded"


CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@of_runs
def test_a_form_accepts_settings_in_the_shape_of_a_configuration(flow: Flow[Any, Any]) -> None:
    """As in runs that were scheduled with an earlier form, and from callers of the API."""
    complete = RunConfig(run_id="given").model_dump(mode="json")
    for given in (complete, {"run_id": None}, {"all_settings": None}, {"all_settings": complete}):
        assert validate({"config": given}, schema_of(flow)) == []


@of_runs
@pytest.mark.parametrize(
    "given", [{"trian": {}}, {"train": {"iteration": 1}}, {"rollout": {"group_size": 0}}]
)
def test_a_wrong_setting_is_refused_wherever_it_is_given(flow: Flow[Any, Any], given: dict[str, Any]) -> None:
    schema = schema_of(flow)
    for config in (given, {"all_settings": given}):
        assert validate({"config": config}, schema) != []


def test_what_the_folded_part_changes_overrides_the_fields_above_and_defaults_change_nothing() -> None:
    section = RunConfig().model_dump(mode="json")["rollout"] | {"group_size": 4, "gate": {"kind": "mixed"}}
    form = {
        "rollout": {"group_size": 16, "max_tokens": 24},
        "train": {"iterations": 2},
        "all_settings": {"seed": 0, "pipeline": None, "train": None, "rollout": section, "run_id": None},
    }
    assert unfold(form) == {
        "rollout": {"group_size": 4, "max_tokens": 24, "gate": {"kind": "mixed"}},
        "train": {"iterations": 2},
    }


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_run_can_be_started_from_the_folded_part(file: Path) -> None:
    config = load_config(file)
    form = {"all_settings": config.model_dump(mode="json")}
    assert validate({"config": form}, schema_of(train)) == []
    assert RunConfig.model_validate(unfold(form)) == config


def test_a_form_without_a_deployment_is_unfolded() -> None:
    given = TypeAdapter(TrainForm).validate_python({"run_id": "r", "all_settings": {"seed": 3}})
    assert given == RunConfig(run_id="r", seed=3)


def test_what_is_unfolded_is_a_configuration_and_stays_one() -> None:
    given = {"rollout": {"group_size": 8}, "policy": {"warmstart": None}}
    assert unfold(given) == unfold({"all_settings": None} | given) == given
    assert unfold({"all_settings": {"policy": {"warmstart": None}}}) == {"policy": {"warmstart": None}}


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
