"""What a trainer stores of its versions for engines: in which dtype, and which of them with a delta."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sf_core.config import PolicyConfig, TrainConfig
from sf_core.config.run_config import DtypeName
from sf_core.models.builtin import make_policy
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.tensor_bytes import TensorBytes, parse
from storage.tensors.weight_delta import load_delta
from storage.tensors.weights import DIGEST, load_weights
from tests.bench.training.batches import grouped_rows, make_batch

BATCH = make_batch(grouped_rows(num_groups=4, group_size=4), logprob=-4.0, group_size=4)


@pytest.fixture
def started_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "run"))
    make_policy(run.start_dir, PolicyConfig(hidden_size=32, num_layers=2), seed=0)
    return run


def make_trainer(run: RunDirectory, dtype: DtypeName = "bfloat16") -> ModelTrainer:
    # so small a rate that few elements of bfloat16 change
    make_model = partial(TorchModel, run.start_dir)
    return ModelTrainer(make_model, TrainConfig(learning_rate=1e-6), seed=0, dtype=dtype)


def folder(run: RunDirectory, version: int) -> str:
    return run.weights_dir(version) if version else run.start_dir


def publish(run: RunDirectory, trainer: ModelTrainer) -> list[str]:
    """Make and store the next version; returns the names of its files."""
    trainer.step(BATCH)
    refs = trainer.save_weights(run.weights_dir(trainer.version), folder(run, trainer.version - 1))
    return [ref.uri.rsplit("/", 1)[1] for ref in refs]


def stored(run: RunDirectory, version: int) -> TensorBytes:
    return parse("stored", bytearray(files.read_bytes(f"{folder(run, version)}/model.safetensors")))


def leads(run: RunDirectory, version: int) -> bool:
    """Whether the delta makes this version of the one before."""
    delta = load_delta(folder(run, version))
    copy = stored(run, version - 1)
    new = stored(run, version)
    assert delta is not None
    delta.apply(copy, copy.digest(), new.header.metadata[DIGEST])
    return copy.data == new.data


def test_versions_are_published_in_their_dtype_and_training_goes_on_in_float32(
    started_run: RunDirectory,
) -> None:
    rounded = make_trainer(started_run)
    exact = make_trainer(started_run, "float32")
    for trainer in (exact, rounded):
        assert publish(started_run, trainer)[0] == "model.safetensors"
        publish(started_run, trainer)
    expected = exact.weights()
    found = load_weights(started_run.weights_dir(2))
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)
    masters = rounded.model.slices(["master"])
    assert all(
        torch.equal(tensor, expected[name.removeprefix("master/")]) for name, (_, tensor) in masters.items()
    )


def test_a_version_has_what_changed_since_the_one_before(started_run: RunDirectory) -> None:
    trainer = make_trainer(started_run)
    # the built-in policy starts in float32, of which no delta leads to bfloat16
    assert publish(started_run, trainer) == ["model.safetensors"]
    for version in (2, 3):
        assert publish(started_run, trainer) == ["model.safetensors", "delta.safetensors"]
        assert leads(started_run, version)
    sizes = [
        len(files.read_bytes(f"{started_run.weights_dir(3)}/{name}.safetensors"))
        for name in ("delta", "model")
    ]
    assert sizes[0] < 0.3 * sizes[1]


def test_the_first_version_has_a_delta_where_the_start_has_its_dtype(started_run: RunDirectory) -> None:
    model = AutoModelForCausalLM.from_pretrained(started_run.start_dir, dtype=torch.bfloat16)
    model.save_pretrained(started_run.start_dir)
    assert publish(started_run, make_trainer(started_run)) == ["model.safetensors", "delta.safetensors"]
    assert leads(started_run, 1)


def test_float32_has_no_deltas_because_every_element_changes(started_run: RunDirectory) -> None:
    trainer = make_trainer(started_run, "float32")
    assert [publish(started_run, trainer) for _ in range(2)] == [["model.safetensors"]] * 2


def test_a_trainer_that_was_made_anew_compares_with_what_is_stored_or_stores_all(
    started_run: RunDirectory,
) -> None:
    trainer = make_trainer(started_run)
    for _ in range(2):
        publish(started_run, trainer)
    trainer.save_checkpoint(started_run.checkpoint_dir(2))
    trainer.await_checkpoint()
    publish(started_run, trainer)
    delta = files.read_bytes(f"{started_run.weights_dir(3)}/delta.safetensors")
    for is_there in (True, False):
        if not is_there:
            files.remove_folder(started_run.weights_dir(2))
        again = make_trainer(started_run)
        again.load_checkpoint(started_run.checkpoint_dir(2))
        assert publish(started_run, again) == ["model.safetensors", "delta.safetensors"][: 1 + is_there]
        if is_there:
            assert files.read_bytes(f"{started_run.weights_dir(3)}/delta.safetensors") == delta
    assert not files.exists(f"{started_run.weights_dir(3)}/delta.safetensors"), "that of an earlier try"
