"""Versions that are measured apart from their run: what is prepared, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.config import RunConfig
from sf_core.models.builtin import make_policy
from sf_core.stages.evaluate import end_measurement, open_evaluation, open_measurement
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights, save_weights
from tests.sf_core.runs import commit, configure, pretend


@pytest.fixture(params=["file", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """A run of two published versions, of which the second has other weights than the start."""
    root = str(tmp_path / "runs") if request.param == "file" else f"memory://{tmp_path}/runs"
    run = RunDirectory(f"{root}/r")
    config = configure(run, train={"iterations": 2}, storage={"root": root})
    pretend(run, 2)
    make_policy(str(tmp_path / "policy"), config.policy, seed=0)
    files.copy_folder(str(tmp_path / "policy"), run.start_dir)
    changed = {name: tensor + 1 for name, tensor in load_weights(run.start_dir).items()}
    save_weights(run.weights_dir(2), changed, 2)
    return run


def test_a_version_is_version_0_of_a_run_directory_of_its_own(run: RunDirectory) -> None:
    config = open_measurement(run.uri, None, ["evaluate.num_tasks=3", "rollout.temperature=0"])
    measured = RunDirectory(config.run_dir)
    assert measured.uri.startswith(f"{run.uri}/evaluations/_measured/v00002-")
    assert (config.evaluate.num_tasks, config.rollout.temperature) == (3, 0.0)
    assert measured.read_config(RunConfig) == config
    weights, start = load_weights(measured.start_dir), load_weights(run.start_dir)
    assert all(bool((weights[name] == start[name] + 1).all()) for name in start)
    assert files.exists(f"{measured.start_dir}/tokenizer.json")
    assert open_evaluation(config).version == 0
    # the same again, and not anew
    assert open_measurement(run.uri, 2, ["evaluate.num_tasks=3", "rollout.temperature=0"]) == config
    assert open_measurement(run.uri, 0, ["evaluate.num_tasks=3"]).run_dir != config.run_dir
    # the run itself is as it was
    assert RunDirectory(run.uri).read_config(RunConfig).evaluate.num_tasks != 3


def test_weights_are_removed_once_they_are_measured(run: RunDirectory) -> None:
    config = open_measurement(run.uri, 2, [])
    measured = RunDirectory(config.run_dir)
    commit(measured, 0, "evaluate", data={"reward_mean": 0.5})
    end_measurement(config)
    assert not files.exists(f"{measured.start_dir}/model.safetensors")
    assert files.exists(f"{measured.start_dir}/tokenizer.json")
    # what was measured needs no weights
    assert open_measurement(run.uri, 2, []) == config
    assert not files.exists(f"{measured.start_dir}/model.safetensors")


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        (7, [], "r: the weights of version 7 are not there; these are: 0, 1, 2"),
        (
            0,
            ["train.iterations=3"],
            "can change environment, evaluate, rollout, engine, cluster",
        ),
        (0, ["policy.dtype=bfloat16"], "--set policy.dtype=bfloat16: an evaluation can change"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    run: RunDirectory, version: int, changes: list[str], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        open_measurement(run.uri, version, changes)
    assert message in str(refused.value)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        open_measurement(str(tmp_path / "none"), None, [])
