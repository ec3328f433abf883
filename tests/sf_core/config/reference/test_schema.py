"""The JSON Schema of configuration files, against the loader."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sf_core.config.reference.page import settings_schema
from sf_core.config.validation import ConfigError, list_settings, validate_config
from sf_core.config.yaml_file import builtin_configs, load_config, read_file

SCHEMA = settings_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def test_it_is_a_json_schema_with_descriptions() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for part in (SCHEMA, *SCHEMA["$defs"].values()):
        for name, own in part["properties"].items():
            assert name == "kind" or own.keys() & {"description", "$ref"}, name


@pytest.mark.parametrize("name", builtin_configs())
def test_every_configuration_of_a_clone_is_valid(name: str) -> None:
    VALIDATOR.validate(read_file(name)[1])
    VALIDATOR.validate(load_config(name).model_dump(mode="json"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"trian": {}},
        {"train": {"iteratoins": 3}},
        {"train": {"iterations": 0}},
        {"train": {"iterations": "many"}},
        {"train": {"iterations": 2.5}},
        {"train": None},
        {"train": {"betas": [0.9]}},
        {"train": {"loss": {"policy": "clpi"}}},
        {"train": {"loss": {"policy": "custom"}}},
        {"train": {"loss": {"policy": {"kind": "clip", "budget": 0.1}}}},
        {"train": {"loss": {"policy": {"budget": 0.1}}}},
        {"train": {"weights": ["fresh", "stale"]}},
        {"rollout": {"overlap": "perhaps"}},
        {"rollout": {"overlap": 2}},
        {"rollout": {"on_max_lag": "never"}},
        {"environment": {"agent": "my_agent"}},
        {"environment": {"agent": {"command": "claude -p"}}},
        {"environment": {"judges": {"a judge": {"url": "http://x"}}}},
        {"engine": {"vllm": {"arguments": ["-O3"]}}},
        {"cluster": {"workers": {"g0": {"device": "cpu"}}}},
        {"run_id": "a/b"},
        {"seed": [1]},
    ],
)
def test_a_wrong_key_or_value_is_not_valid(wrong: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(wrong)
    with pytest.raises(ConfigError):
        validate_config(wrong)


@pytest.mark.parametrize(
    "odd",
    [
        {"train": {"iterations": "7", "learning_rate": "1e-5", "recompute": "yes"}},
        {"train": {"iterations": " 1_0.0 ", "recompute": 1.0, "loss": {"entropy": False}}},
        {"train": {"loss": {"policy": {"high": 0.4}}, "weights": ["unparsed", {"effect": "weight"}]}},
        {"train": {"select": {"keep": 2}, "advantage": "leave_one_out"}},
        {"environment": {"agent": {"command": ["a"]}, "settings": {"x": [{"y": None}]}}},
        {"environment": {"agent": None, "reward": "a.b:c"}},
    ],
)
def test_what_the_loader_converts_is_valid(odd: dict[str, Any]) -> None:
    validate_config(odd)
    VALIDATOR.validate(odd)


NUMBERS = st.one_of(st.integers(-2, 3000), st.floats(allow_nan=False, allow_infinity=False))
TEXTS = st.one_of(
    NUMBERS.map(str),
    st.from_regex(r"\A ?[+-]?[0-9_.]{1,5}(e[+-]?[0-9]{1,2})? ?\Z"),
    st.sampled_from(
        ["yes", "No", "ON", "t", "auto", "a.b:c", "cpu", "cuda:1", "http://h:1", "-", "--a=b", ""]
    ),
    st.text(max_size=4),
)
KINDS = [
    "clip",
    "fresh",
    "overlong",
    "group",
    "gae",
    "varied",
    "mixed",
    "extremes",
    "custom",
    "cispo",
    "none",
]
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.sampled_from(KINDS))
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.fixed_dictionaries({}, optional={"kind": st.sampled_from(KINDS), "keep": SCALARS, "high": SCALARS}),
)
PATHS = sorted({*list_settings()})


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(PATHS), VALUES, min_size=1, max_size=2))
def test_any_configuration_that_the_loader_accepts_is_valid(chosen: dict[str, Any]) -> None:
    data: dict[str, Any] = {}
    for path, value in chosen.items():
        *parents, name = path.split(".")
        section = data
        for parent in parents:
            inner = section.get(parent)
            section[parent] = inner if isinstance(inner, dict) else {}
            section = section[parent]
        section[name] = value
    try:
        validate_config(data)
    except ConfigError:
        return
    VALIDATOR.validate(data)
