import yaml

from sf_core.config import RunConfig
from sf_core.config.yaml_file import settings_page


def test_the_page_of_settings_is_the_configuration_in_which_nothing_was_changed() -> None:
    assert RunConfig.model_validate(yaml.safe_load(settings_page())) == RunConfig()


def test_every_setting_is_there_with_what_it_means() -> None:
    page = " ".join(settings_page().replace("#", " ").split())
    schema = RunConfig.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name, field in part["properties"].items():
            assert f"{name}:" in page, name
            assert " ".join(field.get("description", "").split()) in page
