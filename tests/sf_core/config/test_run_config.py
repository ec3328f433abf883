import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sf_core.config import RunConfig
from sf_core.config.programs import Command
from sf_core.config.validation import ConfigError, validate_config
from sf_core.config.yaml_file import describe_differences, find_differences, load_config, merge_sections
from sf_core.settings import Settings


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nrollout:\n  group_size: 4\n", encoding="utf-8")
    return path


def test_overrides_replace_values_of_the_file_and_add_new_ones(config_file: Path) -> None:
    config = load_config(config_file, ["seed=7", "storage.root=/data/runs", "rollout.group_size=16"])
    assert (config.seed, config.storage.root, config.rollout.group_size) == (7, "/data/runs", 16)


def test_a_resolved_configuration_reads_back_equal(config_file: Path) -> None:
    config = load_config(config_file)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("given", "used"), [("1e-44", 0.01), ("0.009", 0.01), ("0.02", 0.02), ("0", 0.0), ("-0.0", 0.0)]
)
def test_a_temperature_that_logits_would_overflow_at_is_raised(given: str, used: float) -> None:
    rollout = load_config("quickstart", [f"rollout.temperature={given}", "rollout.top_p=1e-44"]).rollout
    assert (rollout.temperature, rollout.top_p) == (used, 1e-6)


def test_an_agent_is_a_function_or_a_command(config_file: Path) -> None:
    assert load_config(config_file, ["environment.agent=a.b:c"]).environment.agent == "a.b:c"
    command = ["environment.agent.command=[claude, -p]", "environment.agent.answer=file:out/a.txt"]
    config = load_config(config_file, command)
    agent = Command(command=("claude", "-p"), answer="file:out/a.txt")
    assert config.environment.agent == agent
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    changed = {"environment": {"agent": {"command": ["codex"]}}}
    base = config.model_dump(mode="json", include={"environment"})
    assert merge_sections(base, changed)["environment"]["agent"]["answer"] == "file:out/a.txt"
    default = RunConfig().environment
    assert list(find_differences(default, config.environment)) == [("agent", default.agent, agent)]


def test_overlap_is_the_pipelines_where_the_user_says_nothing(config_file: Path) -> None:
    for pipeline, overlap, lag in (
        ("colocated", False, 0),
        ("disaggregated", False, 0),
        ("async", True, 2),
        ("multiplexed", True, 2),
        ("null", True, 2),
    ):
        config = load_config(config_file, [f"pipeline={pipeline}", "rollout.max_lag=2"])
        assert (config.overlap, config.lag_bound) == (overlap, lag)
    assert load_config(config_file, ["pipeline=colocated", "rollout.overlap=true"]).overlap


FLOATS = [
    (section, name)
    for section in Settings.__subclasses__()
    for name, field in section.model_fields.items()
    if re.search(r"\bfloat\b", str(field.annotation))
]


@pytest.mark.parametrize(("section", "name"), FLOATS, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "Infinity"])
def test_no_setting_takes_what_json_cannot_keep(section: type[Settings], name: str, value: Any) -> None:
    annotation = str(section.model_fields[name].annotation)
    given = (value, value) if "tuple" in annotation else {"a": value} if "dict" in annotation else value
    with pytest.raises(ValidationError) as refused:
        section.model_validate({name: given})
    faults = [error["type"] for error in refused.value.errors() if error["loc"][0] == name]
    assert set(faults) == {"finite_number"}


def test_an_address_without_a_password_is_taken(config_file: Path) -> None:
    address = "https://planes.example:8700/a"
    assert load_config(config_file, [f"dataplane.url={address}"]).dataplane.url == address


@pytest.mark.parametrize(("workers", "min_workers"), [(8, 4), (4, None)])
def test_gangs_are_multiples_of_the_ranks_that_hold_a_policy_together(
    workers: int, min_workers: int | None
) -> None:
    train = {"workers": workers, "min_workers": min_workers, "backend": "megatron"}
    RunConfig.model_validate({"train": train | {"tensor_parallel": 2, "pipeline_parallel": 2}})


def test_every_setting_is_described_for_the_form() -> None:
    schema = RunConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    undescribed = [
        f"{section['title']}.{name}"
        for section in sections
        for name, field in section["properties"].items()
        # a kind is described as a whole
        if "description" not in field and "$ref" not in field and name != "kind"
    ]
    assert undescribed == []


def test_the_shipped_configurations_are_valid() -> None:
    for path in Path("configs").glob("*.yaml"):
        load_config(path)


DEPLOYED = {"policy": {"warmstart": {"steps": 250}}, "train": {"iterations": 40, "betas": [0.8, 0.9]}}


def test_what_is_given_counts_over_what_is_deployed_setting_by_setting() -> None:
    given = {"run_id": "r", "train": {"iterations": 12}, "rollout": {"max_tokens": 24}}
    merged = merge_sections(DEPLOYED, given)
    assert merged == {
        "run_id": "r",
        "policy": {"warmstart": {"steps": 250}},
        "train": {"iterations": 12, "betas": [0.8, 0.9]},
        "rollout": {"max_tokens": 24},
    }
    assert merge_sections(DEPLOYED, {}) == DEPLOYED
    assert merge_sections({}, given) == given
    assert merge_sections(DEPLOYED, {"policy": {"warmstart": None}})["policy"] == {"warmstart": None}
    assert sorted(describe_differences(DEPLOYED, merged)) == [
        "rollout.max_tokens 24 (deployed: None)",
        "run_id 'r' (deployed: None)",
        "train.iterations 12 (deployed: 40)",
    ]


def test_a_form_that_sends_all_settings_overrides_all_that_are_deployed() -> None:
    form = RunConfig().model_dump(mode="json")
    assert merge_sections(DEPLOYED, form) == form
    assert sorted(describe_differences(DEPLOYED, form)) == [
        "policy.warmstart.steps None (deployed: 250)",
        "train.betas [0.9, 0.95] (deployed: [0.8, 0.9])",
    ]
    assert describe_differences(form, form) == []


def test_what_the_user_names_and_lists_are_given_as_a_whole() -> None:
    deployed = {"cluster": {"workers": {"r0": {"tags": ["rollout"]}}, "prefer": {"train": ["h800"]}}}
    given = {"cluster": {"workers": {"w": {"tags": ["train"]}}}}
    assert merge_sections(deployed, given)["cluster"] == deployed["cluster"] | given["cluster"]
    wrong = {"trian": {"iterations": 1}, "train": {"rate": 1}}
    assert merge_sections(DEPLOYED, wrong)["trian"] == {"iterations": 1}
    with pytest.raises(ConfigError, match=r"train\.rate: unknown key; .*; trian: unknown key"):
        validate_config(merge_sections(DEPLOYED, wrong))


def test_the_real_model_is_trained_with_an_adapter_as_without_but_for_its_rate() -> None:
    whole = load_config("smollm2")
    adapter = load_config("smollm2-lora")
    assert whole.train.learning_rate is not None and adapter.train.lora is not None
    assert adapter.train.learning_rate == pytest.approx(10 * whole.train.learning_rate)
    assert {key for key, _, _ in find_differences(whole, adapter)} == {
        "train.lora",
        "train.learning_rate",
        # small ones, which need not be rare
        "train.checkpoint_every",
        "train.keep_checkpoints",
    }
