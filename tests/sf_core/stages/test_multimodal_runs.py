"""Runs of a multimodal policy: what is published of it, and what is exported in the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sf_core.cli.replay import replay
from sf_core.models.images.processor_config import read_image_processor
from sf_core.stages.evaluate import open_measurement
from sf_core.stages.finish import export_policy
from sf_core.stages.run import OpenRun, RunRef
from sf_core.stages.warmstart import copy_warmed
from storage.files import list_files
from storage.run_directory import RunDirectory
from storage.tensors.weight_delta import FILE_NAME as DELTA
from storage.tensors.weights import load_weights
from tests import bench
from tests.bench import runs
from tests.bench.training import images

ROWS = [[([3, name, 2], 4), ([1, "2", 1], 3)] for name in "0104"]


@pytest.fixture(autouse=True)
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a replay compute with the threads of this process, with which the run was trained: with others sums
    round differently."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def trained(folder: Path, **settings: Any) -> RunDirectory:
    """A run of two steps."""
    run = RunDirectory(str(folder / "run"))
    policy = {"hidden_size": 32, "num_layers": 1, "warmstart": None, "sees": True}
    policy |= settings.pop("policy", {})
    # so small that few weights of bfloat16 change
    config = runs.configure(run, policy=policy, train={"learning_rate": 1e-6} | settings)
    image_processor = images.multimodal_policy(str(folder / "sight"))
    batches = [
        images.multimodal_batch(
            image_processor, run.media_dir, ROWS, group_size=4, version=version, seed=version
        )
        for version in range(2)
    ]
    bench.trained_runs.train(run, config, batches)
    for iteration in range(2):
        runs.commit(run, iteration, "rollout", data={"groups": [iteration], "rejected": {}})
    export_policy(OpenRun(RunRef("run", run.uri, dataplane_url="", attempt=1)))
    return run


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of float32 weights, which tests do not change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        return trained(tmp_path_factory.mktemp("plain"), policy={"dtype": "float32"}, iterations=2)


def split(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of the tower and the others."""
    weights = load_weights(folder)
    tower = {name: tensor for name, tensor in weights.items() if name.startswith("visual.")}
    return tower, {name: tensor for name, tensor in weights.items() if name not in tower}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_language_tensors_alone_are_published_and_the_whole_policy_is_exported(
    plain_run: RunDirectory, tmp_path: Path, dtype: str
) -> None:
    run = plain_run if dtype == "float32" else trained(tmp_path, policy={"dtype": dtype})
    tower, language = split(run.start_dir)
    for version in (1, 2):
        published = load_weights(run.weights_dir(version))
        assert published.keys() == language.keys()
        assert Path(run.weights_dir(version), DELTA).exists() == (dtype == "bfloat16" and version == 2)
    exported_tower, exported = split(run.policy_dir)
    for found, wanted in ((exported_tower, tower), (exported, load_weights(run.weights_dir(2)))):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor.to(getattr(torch, dtype))), name
    assert replay(run.uri, 1).equal
    model = images.loaded(run.policy_dir)
    batch = images.multimodal_batch(run.start_dir, run.media_dir, ROWS)
    scores = images.seen_by_transformers(model, run.policy_dir, run.media_dir, batch)
    assert all(own.isfinite().all() for own in scores)


@pytest.mark.parametrize("renew_every", [None, 1])
def test_a_reference_and_a_critic_see_too(tmp_path: Path, renew_every: int | None) -> None:
    kl = {"coefficient": 0.1, "renew_every": renew_every}
    settings = {"loss": {"kl": kl}, "critic": {}, "advantage": "gae"}
    run = trained(tmp_path, learning_rate=1e-3, **settings)
    first, second = (run.read_committed(iteration, "train").data for iteration in range(2))
    # version 0 against itself, then the version after against it or itself
    assert first["kl_reference"] == pytest.approx(0, abs=1e-6)
    assert (second["kl_reference"] > 1e-6) == (renew_every is None)
    assert first["value_loss"] > 0 and math.isfinite(second["value_loss"])


@pytest.mark.parametrize("divergence", ["reverse", "sampled"])
def test_a_teacher_sees_too(tmp_path: Path, divergence: str) -> None:
    teacher = {"model": str(tmp_path / "sight"), "divergence": divergence}
    run = trained(tmp_path, teacher=teacher, advantage="none")
    batch = images.multimodal_batch(run.start_dir, run.media_dir, ROWS)
    folders = run.start_dir, str(tmp_path / "sight")
    measure = images.predict if divergence == "reverse" else images.seen_by_transformers
    with torch.no_grad():
        own, taught = (torch.cat(measure(images.loaded(one), one, run.media_dir, batch)) for one in folders)
    gaps = ((own - taught) * own.exp()).sum(1) if divergence == "reverse" else own - taught
    measured = run.read_committed(0, "train").data["teacher_kl"]
    # of log-probs that count, because their probability is that of a sampled token
    bench.closeness.assert_rounded(measured, gaps.mean(), bench.closeness.FORWARD, scale=6.0)


def test_a_run_starts_from_the_whole_policy_that_its_warm_start_has_made(
    plain_run: RunDirectory, tmp_path: Path
) -> None:
    run = plain_run
    folder = RunDirectory(str(tmp_path / "next")).start_dir
    copies = copy_warmed(run.uri, folder)
    assert sorted(map(Path, list_files(folder))) == sorted(Path(ref.uri) for ref in copies)
    found = load_weights(folder)
    wanted = load_weights(run.policy_dir)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert read_image_processor(folder) == read_image_processor(run.start_dir)


def test_an_adapter_of_the_language_part_is_merged_into_the_export(tmp_path: Path) -> None:
    run = trained(tmp_path, lora={}, learning_rate=1e-3)
    assert not any("visual" in name for name in load_weights(run.policy_adapter_dir))
    tower, language = split(run.start_dir)
    exported_tower, exported = split(run.policy_dir)
    assert all(torch.equal(exported_tower[name], tensor) for name, tensor in tower.items())
    assert exported.keys() == language.keys()
    changed = {name for name, tensor in language.items() if not torch.equal(exported[name], tensor)}
    assert changed == {name for name in language if "proj.weight" in name}


def test_a_version_that_is_measured_apart_is_the_whole_policy(
    plain_run: RunDirectory, tmp_path: Path
) -> None:
    run = runs.copy_run(plain_run, tmp_path)
    measurement = open_measurement(run.uri, 1, [])
    measurement.begin()
    assert not measurement.config.policy.sees
    tower, language = split(measurement.directory.start_dir)
    assert tower.keys() == split(run.start_dir)[0].keys()
    published = load_weights(run.weights_dir(1))
    assert all(torch.equal(language[name], tensor) for name, tensor in published.items())
    assert read_image_processor(measurement.directory.start_dir) is not None
