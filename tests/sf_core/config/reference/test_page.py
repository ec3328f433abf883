"""Parts of the page of settings, and the paths of all settings."""

import pytest
import yaml

from sf_core.config import RunConfig
from sf_core.config.reference.page import settings_page
from sf_core.config.validation import ConfigError, list_settings, validate_config


@pytest.mark.parametrize(
    "path", ["train", "train.loss", "train.loss.policy", "cluster.workers", "seed", "engine.vllm"]
)
def test_a_part_of_the_page_is_a_configuration_of_defaults(path: str) -> None:
    part = settings_page(path)
    assert validate_config(yaml.safe_load(part)) == RunConfig()
    lines = {line.strip(" #") for line in settings_page().splitlines()}
    assert {line.strip(" #") for line in part.splitlines() if not line.strip().startswith("#")} <= lines


def test_a_single_setting_is_printed_alone() -> None:
    part = settings_page("train.learning_rate")
    assert part.startswith("train:\n  # Learning rate of AdamW")
    assert part.endswith("\n  learning_rate: null\n")
    assert "weight_decay" not in part


def test_of_a_union_all_kinds_are_printed() -> None:
    part = settings_page("train.loss.policy")
    assert all(f"kind {kind}: " in part for kind in ("plain", "cispo", "m2po", "sequence_clip", "custom"))
    high = settings_page("train.loss.policy.high")
    assert [line.split(":")[0] for line in high.splitlines() if line.startswith("# train.")] == [
        f"# train.loss.policy.high of kind {kind}" for kind in ("cispo", "sequence_clip", "clip")
    ]
    assert "of kind fresh: " in settings_page("train.weights.max_lag")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("train.teacher.model", "Folder of a Hugging Face causal LM"),
        ("cluster.workers.mine.device", "Device on which the worker computes"),
        ("environment.agent.sandbox.image", "OCI image"),
        ("environment.judges.strict.url", "Address of a server with the OpenAI API"),
    ],
)
def test_a_setting_of_a_section_that_is_empty_by_default_is_described(path: str, text: str) -> None:
    assert settings_page(path).startswith(f"# {path}: {text}")


def test_the_name_of_a_kind_is_explained_with_its_section() -> None:
    assert settings_page("train.loss.policy.kind") == settings_page("train.loss.policy")


def test_a_long_default_has_spaces_where_lines_break() -> None:
    assert '{"tags": ["rollout"], ' in " ".join(settings_page("cluster.workers.t0").split("\n# "))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("learning_rate", "did you mean policy.warmstart.learning_rate or train.learning_rate or"),
        ("train.learing_rate", "did you mean train.learning_rate"),
        ("train.loss.policy.hihg", "did you mean train.loss.policy.high"),
        ("train.betas.0", "did you mean train.betas"),
        ("train.", "did you mean train"),
        ("zzz", "`sf settings` prints all settings"),
    ],
)
def test_an_unknown_setting_is_told_similar_ones(path: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_page(path)
    assert str(refused.value).startswith(f"{path}: unknown setting; {hint}")


def test_every_listed_path_is_on_the_page() -> None:
    paths = [*list_settings()]
    assert {
        "run_id",
        "train",
        "train.loss.policy.high",
        "cluster.workers.t0.device",
        "train.teacher.url",
    } <= {*paths}
    for path in paths:
        assert ": None " not in settings_page(path)
