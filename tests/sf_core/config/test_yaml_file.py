from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.programs import Command
from sf_core.config.reference.page import settings_page
from sf_core.config.validation import ConfigError, validate_config
from sf_core.config.yaml_file import builtin_configs, load_config
from sf_core.recipes.losses import Cispo, Clip

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
    Path("quickstart").write_text("seed: 7\n", encoding="utf-8")
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
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "mine.yaml", list(overrides))


def test_a_key_over_one_that_is_merged_in_counts(tmp_path: Path) -> None:
    text = "storage: &s {root: a}\ntrain: {iterations: 7}\n"
    assert loaded(tmp_path, text).storage.root == "a"
    text = "cluster:\n  workers:\n    a: &w {tags: [agent, cpu]}\n    b: {<<: *w, tags: [rollout, train]}\n"
    assert set(loaded(tmp_path, text).cluster.workers["b"].tags) == {"rollout", "train"}


@pytest.mark.parametrize("given", ["0100", "100", "1e2", "0o144"])
def test_a_number_is_read_as_it_is_written(tmp_path: Path, given: str) -> None:
    assert loaded(tmp_path, f"train:\n  iterations: {given}\n").train.iterations == 100
    assert loaded(tmp_path, "", f"train.iterations={given}").train.iterations == 100


@pytest.mark.parametrize("word", ["yes", "no", "on", "off"])
def test_a_word_stays_a_word_and_a_switch_knows_it(tmp_path: Path, word: str) -> None:
    assert loaded(tmp_path, f"run_id: {word}\n").run_id == word
    assert loaded(tmp_path, "", f"run_id={word}").run_id == word
    assert loaded(tmp_path, f"rollout: {{overlap: {word}}}\n").rollout.overlap is (word in ("yes", "on"))


def write(folder: Path, **texts: str) -> list[Path]:
    files = [folder / f"{name}.yaml" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def test_of_several_files_the_later_counts_setting_by_setting(tmp_path: Path) -> None:
    [mine] = write(
        tmp_path, mine="train: {learning_rate: 0.002, minibatches: 2}\nrollout: {max_tokens: 24}\n"
    )
    config = load_config([mine, "gspo"], ["rollout.group_size=4"])
    recipe = load_config("gspo")
    assert (config.train.learning_rate, config.rollout.max_tokens) == (0.002, 24)
    assert (config.train.loss, config.train.minibatches) == (recipe.train.loss, 4)
    assert config.rollout.group_size == 4
    assert load_config(["gspo", mine]).train.minibatches == 2


def test_a_section_of_another_kind_replaces_an_earlier_one_and_of_the_same_kind_changes_it(
    tmp_path: Path,
) -> None:
    files = write(
        tmp_path,
        first="train: {loss: {policy: {kind: clip, low: 0.1, cap: null}}}\n",
        same="train: {loss: {policy: {low: 0.3}}}\n",
        other="train: {loss: {policy: {kind: cispo, high: 0.5}}}\n",
    )
    assert load_config(files[:2]).train.loss.policy == Clip(low=0.3, cap=None)
    assert load_config(files).train.loss.policy == Cispo(high=0.5)


WORKERS = "cluster: {workers: {w0: {tags: [rollout, train]}, a0: {tags: [agent]}, c0: {tags: [cpu]}}}\n"


def test_the_workers_of_a_file_are_all_workers_and_an_option_edits_one(tmp_path: Path) -> None:
    files = write(tmp_path, first=WORKERS, later="cluster: {workers: {x: {tags: [cpu]}}}\n")
    assert list(load_config(files).cluster.workers) == ["x"]
    edited = load_config(files[0], ["cluster.workers.w0.device=cuda:1"]).cluster.workers
    assert {name: one.device for name, one in edited.items()} == {"w0": "cuda:1", "a0": None, "c0": None}
    default = load_config("gspo", ["cluster.workers.t0.threads=3"]).cluster.workers
    assert default["t0"].threads == 3
    assert default | {"t0": WorkerConfig(tags=("rollout", "train"))} == RunConfig().cluster.workers


def test_a_wrong_setting_is_named_with_the_file_and_the_line_in_which_it_is_written(tmp_path: Path) -> None:
    mine, later = write(tmp_path, mine="train:\n  iterations: 3\n  rate: 1\n", later="seed: 1\ntrian: {}\n")
    with pytest.raises(ConfigError) as refused:
        load_config([mine, later], ["train.betas=[2, 0]"])
    sentences = str(refused.value).split("; ")
    assert sentences[0].startswith("--set train.betas.0: input should be less than 1")
    assert any(sentence.startswith(f"{mine} line 3: train.rate: unknown key") for sentence in sentences)
    assert any(sentence.startswith(f"{later} line 2: trian: unknown key") for sentence in sentences)


@pytest.mark.parametrize("key", ["policy.model", "policy.warmstart.demonstrations", "storage.root"])
@pytest.mark.parametrize("written", ["~/a/b", "${PLACE}/a/b", "$PLACE/a/b"])
def test_a_home_and_variables_are_replaced_in_paths(
    monkeypatch: pytest.MonkeyPatch, key: str, written: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PLACE", "/home/me")
    assert attrgetter(key)(load_config("gspo", [f"{key}={written}"])) == "/home/me/a/b"
    config = validate_config({"environment": {"settings": {"dataset": written, "text": "a $b ${c}"}}})
    is_path = not written.startswith("$P")
    assert config.environment.settings["dataset"] == ("/home/me/a/b" if is_path else written)
    assert config.environment.settings["text"] == "a $b ${c}"
    agent = {"command": ["a"], "sandbox": {"paths": [written]}}
    sandboxed = validate_config({"environment": {"agent": agent}}).environment.agent
    assert isinstance(sandboxed, Command) and sandboxed.sandbox is not None
    assert sandboxed.sandbox.paths == ("/home/me/a/b",)
