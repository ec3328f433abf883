"""Versions that are measured apart from their run: what is prepared, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.config import RunConfig
from sf_core.models.builtin import make_policy
from sf_core.stages.evaluate import open_evaluation, open_measurement
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights, save_weights
from tests.bench.runs import commit, configure, pretend


@pytest.fixture
def changed_run(runs_root: str, tmp_path: Path) -> RunDirectory:
    """A run of two published versions, of which the second has other weights than the start."""
    root = f"{runs_root}/runs"
    run = RunDirectory(f"{root}/r")
    config = configure(run, train={"iterations": 2}, storage={"root": root})
    pretend(run, 2)
    make_policy(str(tmp_path / "policy"), config.policy, seed=0)
    files.copy_folder(str(tmp_path / "policy"), run.start_dir)
    changed = {name: tensor + 1 for name, tensor in load_weights(run.start_dir).items()}
    save_weights(run.weights_dir(2), changed, 2)
    return run


def test_a_version_is_version_0_of_a_run_directory_of_its_own(changed_run: RunDirectory) -> None:
    changes = ["evaluate.num_tasks=3", "rollout.temperature=0"]
    measurement = open_measurement(changed_run.uri, None, changes)
    config = measurement.config
    measured = measurement.directory
    assert measured.uri.startswith(f"{changed_run.uri}/measured/v00002-")
    assert (config.evaluate.num_tasks, config.rollout.temperature) == (3, 0.0)
    assert not files.exists(measured.path("config.json"))
    measurement.begin()
    assert measured.read_config(RunConfig) == config
    weights = load_weights(measured.start_dir)
    start = load_weights(changed_run.start_dir)
    assert all(bool((weights[name] == start[name] + 1).all()) for name in start)
    assert files.exists(f"{measured.start_dir}/tokenizer.json")
    assert open_evaluation(config).version == 0
    # the same again, and not anew
    assert open_measurement(changed_run.uri, 2, changes).config == config
    assert open_measurement(changed_run.uri, 0, changes).config.run_id != config.run_id
    # the run itself is as it was
    assert RunDirectory(changed_run.uri).read_config(RunConfig).evaluate.num_tasks != 3


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([], "v00002-56e5ba88"),
        (["rollout.temperature=0.00001", "engine.vllm.sleep_level=1"], "v00002-bebdf370"),
    ],
)
def test_what_was_measured_while_there_was_a_setting_that_was_removed_is_found_by_its_name(
    changed_run: RunDirectory, changes: list[str], name: str
) -> None:
    # as d2126b17 names them; a setting that comes to these sections changes all names
    assert open_measurement(changed_run.uri, 2, changes).directory.run_id == name


def test_weights_are_removed_once_they_are_measured_and_needed_no_more(changed_run: RunDirectory) -> None:
    measurement = open_measurement(changed_run.uri, 2, [])
    measurement.begin()
    commit(measurement.directory, 0, "evaluate", data={"reward_mean": 0.5})
    measurement.end()
    start = measurement.directory.start_dir
    assert not files.exists(f"{start}/model.safetensors") and files.exists(f"{start}/tokenizer.json")
    files.remove_folder(changed_run.weights_dir(2))
    assert open_measurement(changed_run.uri, 2, []).is_done


def test_an_interrupted_measurement_is_begun_again(changed_run: RunDirectory) -> None:
    measurement = open_measurement(changed_run.uri, 2, [])
    files.copy_folder(changed_run.start_dir, measurement.directory.start_dir)
    measurement.begin()
    weights = load_weights(measurement.directory.start_dir)
    start = load_weights(changed_run.start_dir)
    assert all(bool((weights[name] == start[name] + 1).all()) for name in start)


def test_a_section_can_be_given_whole_and_what_training_forbids_does_not_hold(
    changed_run: RunDirectory,
) -> None:
    configure(changed_run, train={"iterations": 4, "loss": {"kl": {"coefficient": 1, "renew_every": 2}}})
    changes = ["environment={name: reasoning_gym, settings: {datasets: {gcd: {}}}}", "rollout.temperature=0"]
    config = open_measurement(changed_run.uri, 0, changes).config
    assert config.environment.name == "reasoning_gym"
    assert RunConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        (7, [], "r: the weights of version 7 are not stored; stored versions: 0, 1, 2"),
        (
            0,
            ["train.iterations=3"],
            "can only change environment, evaluate, rollout, engine, cluster",
        ),
        (0, ["policy.dtype=bfloat16"], "--set policy.dtype=bfloat16: an evaluation can only change"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    changed_run: RunDirectory, version: int, changes: list[str], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        open_measurement(changed_run.uri, version, changes).begin()
    assert message in str(refused.value)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        open_measurement(str(tmp_path / "none"), None, [])
