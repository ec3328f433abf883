"""The trainer of a worker: kept while it matches, else rebuilt with equal state."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from sf_core.config.devices import WorkerDevice
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import SingleRank
from sf_core.training.torch.trainer import ModelTrainer
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights
from tests.bench.runs import configure, copy_run
from tests.bench.trained_runs import SETTINGS

CHANGED = SETTINGS | {
    "learning_rate": 1e-2,
    "weight_decay": 0.5,
    "loss": {"policy": {"high": 0.1}},
    "minibatches": 2,
}


@pytest.fixture
def directory(trained_run: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_run(trained_run, tmp_path)


@pytest.fixture
def backend() -> TorchBackend:
    return TorchBackend(WorkerDevice())


def attempt(directory: RunDirectory, number: int) -> OpenRun:
    return OpenRun(RunRef(directory.run_id, directory.uri, dataplane_url="", attempt=number))


def holds(trainer: ModelTrainer, directory: RunDirectory, version: int) -> bool:
    stored = load_weights(directory.weights_dir(version))
    weights = trainer.weights()
    return all(torch.equal(stored[name], weights[name]) for name in stored)


def test_a_trainer_stays_until_another_attempt_trains_with_what_that_has_set(
    directory: RunDirectory, backend: TorchBackend
) -> None:
    first = attempt(directory, 1)
    with backend.trainer_at(first, 2, SingleRank()) as trainer:
        assert trainer.config == first.config.train
    with backend.trainer_at(first, 2, SingleRank()) as kept:
        assert kept is trainer
    configure(directory, train=CHANGED)
    # what the trainer of another attempt holds may never have been committed
    with backend.trainer_at(attempt(directory, 2), 2, SingleRank()) as another:
        assert another is not trainer and holds(another, directory, 2)
        assert another.config.weight_decay == 0.5


def test_settings_that_changed_leave_the_steps_before_as_they_were(
    directory: RunDirectory, backend: TorchBackend
) -> None:
    configure(directory, train=CHANGED)
    for version in (1, 3):
        with backend.trainer_at(attempt(directory, 1), version, SingleRank()) as trainer:
            assert holds(trainer, directory, version)
            assert trainer.config.weight_decay == 0.5


def test_the_trainer_before_is_gone_when_another_is_made(
    directory: RunDirectory, backend: TorchBackend
) -> None:
    run = attempt(directory, 1)
    with backend.trainer_at(run, 2, SingleRank()) as trainer:
        left = weakref.ref(trainer)
    gc.collect()  # else those of other tests may go meanwhile
    before = num_trainers()
    when_it_went = []
    weakref.finalize(trainer, lambda: when_it_went.append(num_trainers()))
    del trainer
    with backend.trainer_at(run, 1, SingleRank()):
        assert left() is None
    assert when_it_went == [before - 1]
    backend.close()
    assert num_trainers() == before - 1


def num_trainers() -> int:
    return sum(type(found) is ModelTrainer for found in gc.get_objects())


def test_a_damaged_batch_is_not_trained_on_again(directory: RunDirectory, backend: TorchBackend) -> None:
    batch = f"{directory.partition('batches', 0)}/batch-1.parquet"
    files.write_atomic(batch, files.read_bytes(batch) + b" ")
    with pytest.raises(ValueError, match="filter of iteration 0 wrote"):
        backend.rebuild_trainer(attempt(directory, 1), 1, SingleRank())


def test_settings_that_are_none_are_named(directory: RunDirectory, backend: TorchBackend) -> None:
    manifest = directory.read_manifest(0, "train")
    assert manifest is not None
    broken = manifest.model_copy(update={"data": manifest.data | {"settings": {"learning_rate": -1}}})
    uri = directory.manifest_file(0, "train")
    files.write_atomic(uri, broken.model_dump_json().encode())
    with pytest.raises(ValueError, match=r"train\.json: data\.settings is invalid: learning_rate: "):
        backend.rebuild_trainer(attempt(directory, 1), 1, SingleRank())
