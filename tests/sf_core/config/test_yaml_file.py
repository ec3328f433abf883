from pathlib import Path

import pytest
import yaml

from sf_core.config import RunConfig
from sf_core.config.yaml_file import builtin_configs, load_config, settings_page

CONFIGS = Path(__file__).parents[3] / "configs"


def test_every_configuration_of_a_clone_has_a_name() -> None:
    named = builtin_configs()
    assert {file.resolve() for file in named.values()} == set(CONFIGS.rglob("*.yaml"))
    for name, file in named.items():
        assert load_config(name) == load_config(file)


def test_a_file_counts_over_a_name_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("seed: 7\n")
    Path("grpo").mkdir()
    assert load_config("quickstart") == RunConfig(seed=7)
    assert load_config("grpo") == load_config(CONFIGS / "recipes" / "grpo.yaml")


def test_the_page_of_settings_is_the_configuration_in_which_nothing_was_changed() -> None:
    assert RunConfig.model_validate(yaml.safe_load(settings_page())) == RunConfig()


def test_every_setting_is_there_with_what_it_means() -> None:
    page = " ".join(settings_page().replace("#", " ").split())
    schema = RunConfig.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name, field in part["properties"].items():
            assert f"{name}:" in page, name
            assert " ".join(field.get("description", "").split()) in page
