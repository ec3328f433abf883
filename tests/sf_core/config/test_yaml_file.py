from pathlib import Path

import pytest
import yaml

from sf_core.config import RunConfig
from sf_core.config.validation import ConfigError
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


def loaded(folder: Path, text: str, *overrides: str) -> RunConfig:
    (folder / "mine.yaml").write_text(text)
    return load_config(folder / "mine.yaml", list(overrides))


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("train: {learning_rate: 0.001}\nseed: 1\n\ntrain:\n  iterations: 7\n", "'train'", (1, 4)),
        ("train:\n  iterations: 7\n  iterations: 8\n", "'iterations'", (2, 3)),
        ("seed: 1\n'seed': 2\n", "'seed'", (1, 2)),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(
    tmp_path: Path, text: str, key: str, lines: tuple[int, int]
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, text)
    told = (
        f"the key {key} stands in line {lines[0]} and again in line {lines[1]}: write what belongs to it once"
    )
    assert str(refused.value) == f"{tmp_path}/mine.yaml: not valid YAML: {told}"


def test_a_key_over_one_that_is_merged_in_counts(tmp_path: Path) -> None:
    text = "storage: &s {root: a}\ntrain: {iterations: 7}\n"
    assert loaded(tmp_path, text).storage.root == "a"
    text = "cluster:\n  workers:\n    a: &w {tags: [agent, cpu]}\n    b: {<<: *w, tags: [rollout, train]}\n"
    assert set(loaded(tmp_path, text).cluster.workers["b"].tags) == {"rollout", "train"}


@pytest.mark.parametrize("given", ["0100", "100", "1e2", "0o144"])
def test_a_number_is_read_as_it_is_written(tmp_path: Path, given: str) -> None:
    assert loaded(tmp_path, f"train:\n  iterations: {given}\n").train.iterations == 100
    assert loaded(tmp_path, "", f"train.iterations={given}").train.iterations == 100


def test_minutes_are_no_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.iterations: .*'1:30'"):
        loaded(tmp_path, "train:\n  iterations: 1:30\n")


@pytest.mark.parametrize("word", ["yes", "no", "on", "off"])
def test_a_word_stays_a_word_and_a_switch_knows_it(tmp_path: Path, word: str) -> None:
    assert loaded(tmp_path, f"run_id: {word}\n").run_id == word
    assert loaded(tmp_path, "", f"run_id={word}").run_id == word
    assert loaded(tmp_path, f"rollout: {{overlap: {word}}}\n").rollout.overlap is (word in ("yes", "on"))


def test_what_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml: not valid YAML: line 2: "):
        loaded(tmp_path, "seed: 1\ntrain: [1, }\n")
