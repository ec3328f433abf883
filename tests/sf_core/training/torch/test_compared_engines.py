"""What engines reported of an earlier version is compared with what its stored weights give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from sf_core.config.devices import WorkerDevice
from sf_core.stages.run import OpenRun, RunRef
from sf_core.stages.train import list_comparable
from sf_core.training.packing.rows import read_rows, sampled_by_one_of
from sf_core.training.torch import trainer as trainer_module
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import SingleRank
from sf_core.training.torch.trainer import ModelTrainer
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights
from tests.bench.trained_runs import train_run
from tests.bench.training.batches import grouped_rows, make_batch

REPORTED = -4.0
ROWS = grouped_rows(num_groups=40, group_size=4)


def batch_of(version: int, rows: Any = ROWS) -> pa.Table:
    return make_batch(rows, logprob=REPORTED, version=version, group_size=4)


@pytest.fixture(scope="module", params=["weights", "adapter"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that has made the versions 1 to 3."""
    settings: dict[str, Any] = {"iterations": 4, "checkpoint_every": 3, "learning_rate": 0.01}
    if request.param == "adapter":
        settings["lora"] = {}
    return train_run(tmp_path_factory.mktemp("run"), settings, [batch_of(version) for version in range(3)])


@pytest.fixture
def trainer(run: RunDirectory) -> Iterator[ModelTrainer]:
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=0))
    yield TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank(), "cpu")


def of_version(run: RunDirectory, version: int, row: Any) -> np.ndarray[Any, Any]:
    """Log-probs of the trained tokens of a row by transformers."""
    model = AutoModelForCausalLM.from_pretrained(run.start_dir)
    model.load_state_dict(load_weights(run.weights_dir(version)), strict=False)
    ids = torch.tensor(row.token_ids).long()
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
    places = np.flatnonzero(row.loss_mask)
    return logprobs[places - 1, ids[places]].numpy()


def test_the_difference_is_that_to_the_weights_which_sampled(
    run: RunDirectory, trainer: ModelTrainer
) -> None:
    batch = pa.concat_tables([batch_of(1), batch_of(2)])
    trainer.step(batch)
    found = trainer.compare_engines(batch, run.list_versions("weights"))
    assert found["lagged_difference_version"] == 2
    rows = [row for row in read_rows(batch) if row.policy_versions[row.loss_mask][0] == 2]
    ends = np.cumsum([row.loss_mask.sum() for row in rows])
    compared = ends[np.flatnonzero(ends >= 512)[0]]
    assert found["lagged_difference_tokens"] == compared < ends[-1]
    listed = {path.name for path in Path(run.weights_dir(2)).iterdir()}
    if "adapter_model.safetensors" not in listed:
        own = np.concatenate([of_version(run, 2, row) for row in rows[: int((ends <= compared).sum())]])
        assert found["lagged_difference_mean"] == pytest.approx(np.abs(own - REPORTED).mean(), rel=1e-5)
        assert found["lagged_difference_max"] == pytest.approx(np.abs(own - REPORTED).max(), rel=1e-5)


def test_the_second_step_is_compared_with_the_weights_of_the_start(tmp_path: Path) -> None:
    """As in a run of two workers, whose whole second batch was sampled by version 0."""
    run = train_run(tmp_path, {"iterations": 2}, [batch_of(0)])
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=0))
    trainer = TorchBackend(WorkerDevice()).rebuild_trainer(opened, 1, SingleRank(), "cpu")
    batch = batch_of(0)
    assert trainer.step(batch)["engine_difference_tokens"] == 0
    found = trainer.compare_engines(batch, list_comparable(opened))
    assert found["lagged_difference_version"] == 0 and found["lagged_difference_tokens"] >= 512


def test_the_step_after_a_comparison_is_the_same(run: RunDirectory, trainer: ModelTrainer) -> None:
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=0))
    other = TorchBackend(WorkerDevice()).rebuild_trainer(opened, 3, SingleRank(), "cpu")
    for one in (trainer, other):
        one.step(batch_of(2))
    assert trainer.compare_engines(batch_of(2), run.list_versions("weights"))
    for one in (trainer, other):
        one.step(batch_of(4))
    expected = other.weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.weights().items())


@pytest.mark.parametrize(
    ("version", "stored", "free"),
    [
        pytest.param(3, [1, 2, 3, 4], 1 << 40, id="sampled by the version of the step"),
        pytest.param(2, [1, 3, 4], 1 << 40, id="not stored"),
        pytest.param(2, [1, 2, 3, 4], 0, id="no room"),
    ],
)
def test_nothing_is_told_where_nothing_can_be_compared(
    trainer: ModelTrainer, monkeypatch: pytest.MonkeyPatch, version: int, stored: list[int], free: int
) -> None:
    monkeypatch.setattr(trainer_module, "free_memory", lambda _: free)
    trainer.step(batch_of(version))
    assert trainer.compare_engines(batch_of(version), stored) == {}


def test_rows_that_several_versions_sampled_are_left_out() -> None:
    rows = read_rows(batch_of(2, [([5, 6, 7, 8], [False, True, True, True])] * 8))
    for number, row in enumerate(rows[:4]):
        versions = row.policy_versions.copy()
        versions[np.flatnonzero(row.loss_mask)[0]] = 1
        rows[number] = replace(row, policy_versions=versions)
    version, chosen = sampled_by_one_of(rows, {1, 2})
    assert (version, [row.number for row in chosen]) == (2, [4, 5, 6, 7])
    assert sampled_by_one_of(rows, {1}) == (-1, [])
