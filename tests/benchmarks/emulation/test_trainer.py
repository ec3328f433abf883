"""Ranks that sleep instead of computing wait for each other like real ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.emulation.device_model import DeviceModel
from benchmarks.emulation.trainer import EmulatedBackend, EmulatedRanks, EmulatedTrainer
from sf_core.config import EmulationConfig
from sf_core.config.devices import WorkerDevice, find_device
from sf_core.stages.run import OpenRun, RunRef
from sf_core.testing.trainers import TrainerTests
from sf_core.training.gang import GangError, RankAssignment, join_gang
from storage.gangs import GangFiles
from storage.run_directory import RunDirectory
from tests.bench.runs import commit, configure
from tests.bench.training.batches import make_batch

WORKERS = ("h800", "h20")


class TestContract(TrainerTests):
    @pytest.fixture(autouse=True)
    def _in(self, empty_run: RunDirectory) -> None:
        self.backend = EmulatedBackend(WorkerDevice())
        self.directory = empty_run
        configure(empty_run, engine={"kind": "emulated"}, emulation={"time_dilation": 1e9})

    def begin(self, attempt: int) -> OpenRun:
        return OpenRun(RunRef("run", self.directory.uri, dataplane_url="", attempt=attempt))

    def batch(self, iteration: int) -> pa.Table:
        return make_batch([([1] * 50, [False] + [True] * 49)] * 2, version=iteration)


def step(run: RunDirectory, rank: int, timeout_s: float = 30.0) -> list[int]:
    """Run a step; returns the ranks that had computed when it was over."""
    files = one_try(run)
    backend = EmulatedBackend(WorkerDevice())
    with join_gang(backend.meet, files, RankAssignment(WORKERS, rank), "", timeout_s) as ranks:
        model = DeviceModel(EmulationConfig(parameters=1e11), find_device(WORKERS[rank]))
        EmulatedTrainer(model, 0, ranks).step(make_batch([([1] * 50, [True] * 50)] * 2))
        found = [other for other in range(len(WORKERS)) if files.has_computed(other)]
        if rank == 0:
            commit(run, 0, "train")
    return found


def one_try(run: RunDirectory) -> GangFiles:
    return GangFiles(run, 0, attempt=1, step_attempt=0)


def test_what_does_not_train_takes_no_time_and_is_not_counted() -> None:
    batch = make_batch([([1] * 50, [False] + [True] * 49)] * 4)
    place = batch.schema.get_field_index("decision")
    some = batch.set_column(place, "decision", pa.array(["train", "not_extreme", "not_extreme", "train"]))
    model = DeviceModel(EmulationConfig(parameters=1e11, time_dilation=1e9), find_device("h20"))
    trainer = EmulatedTrainer(model, 0, EmulatedRanks(0, 1, lambda: None))
    found = trainer.step(some)
    alone = trainer.step(batch.slice(0, 2))
    assert (found["tokens"], found["rows"], found["seconds"]) == (98, 2, alone["seconds"])
    assert found["reward_mean"] == pytest.approx(np.mean(batch["reward"].to_numpy()))


def test_no_step_is_over_before_the_slowest_rank_has_computed(empty_run: RunDirectory) -> None:
    with ThreadPoolExecutor() as pool:
        steps = [pool.submit(step, empty_run, rank) for rank in range(2)]
        assert [each.result() for each in steps] == [[0, 1], [0, 1]]


def test_a_rank_that_does_not_finish_is_named_after_the_bound(empty_run: RunDirectory) -> None:
    assert one_try(empty_run).begin_rank(1, once=True)
    with pytest.raises(GangError, match=r"rank 1 \(h20\) has not computed its share within 0.1 s"):
        step(empty_run, 0, timeout_s=0.1)
