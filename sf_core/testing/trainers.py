"""The contract of trainer backends, as tests: a test class inherits from TrainerTests and names its backend.

Needs no pytest. A pytest fixture of the subclass may set what its methods need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from sf_core.training.backends import TrainedRun, Trainer, TrainerBackend
from sf_core.training.gang import RankAssignment, join_gang
from storage import files
from storage.files import FileRef
from storage.gangs import GangFiles
from storage.manifests import Manifest
from storage.tables import parquet

METRICS = {"tokens", "rows", "reward_mean", "seconds"}
"""Metrics that every backend measures."""


class TrainerTests:
    backend: TrainerBackend

    def begin(self, attempt: int) -> TrainedRun:
        """The run as this attempt opens it: a directory with a start folder, and at first no iteration. Every
        call is for the same directory."""
        raise NotImplementedError

    def batch(self, iteration: int) -> pa.Table:
        """A batch whose tokens version `iteration` sampled."""
        raise NotImplementedError

    def test_a_step_makes_the_next_version_and_measures_it(self) -> None:
        run = self.begin(attempt=1)
        with self._trainer(run, 0) as trainer:
            assert trainer.version == 0 and trainer.device
            metrics = trainer.step(self.batch(0))
            assert trainer.version == 1
        assert metrics.keys() >= METRICS
        assert not any(math.isinf(value) for value in metrics.values())
        rows = self.batch(0)
        trained = sum(sum(mask) for mask in rows["loss_mask"].to_pylist())
        assert (metrics["rows"], metrics["tokens"]) == (len(rows), trained)

    def test_weights_are_stored_under_the_version_that_is_held(self) -> None:
        run = self.begin(attempt=1)
        first = self._step(run, 0)
        second = self._step(run, 1)
        assert all(ref.uri.startswith(run.directory.weights_dir(1)) for ref in first)
        assert all(ref.uri.startswith(run.directory.weights_dir(2)) for ref in second)
        assert first[0].sha256 != second[0].sha256

    def test_a_trainer_that_was_lost_goes_on_with_equal_weights(self) -> None:
        run = self.begin(attempt=1)
        last = [self._step(run, iteration) for iteration in range(3)][-1]
        # what the trainer of another attempt holds does not count
        assert self._repeat(self.begin(attempt=2), 2) == [ref.sha256 for ref in last]

    def test_a_checkpoint_is_there_when_it_was_awaited_and_needs_no_batch_before_it(self) -> None:
        run = self.begin(attempt=1)
        version = run.config.train.interval
        for iteration in range(version):
            self._step(run, iteration)
        with self._trainer(run, version) as trainer:
            trainer.await_checkpoint()
        files.remove_folder(run.directory.path("batches"))
        with self._trainer(self.begin(attempt=2), version) as trainer:
            assert trainer.version == version

    def test_a_trainer_that_rests_between_steps_goes_on_as_if_it_had_not(self) -> None:
        run = self.begin(attempt=1)
        expected = [self._step(run, iteration)[0].sha256 for iteration in range(3)]
        run = self.begin(attempt=2)
        with self._trainer(run, 0):
            pass
        for iteration in range(3):
            self.backend.rest()
            assert self._repeat(run, iteration)[0] == expected[iteration]

    def test_a_step_that_failed_is_made_again_from_the_version_before(self) -> None:
        run = self.begin(attempt=1)
        expected = self._step(run, 0)
        run = self.begin(attempt=2)
        with suppress(InterruptedError), self._trainer(run, 0) as trainer:
            trainer.step(self.batch(0))
            raise InterruptedError
        assert self._repeat(run, 0) == [ref.sha256 for ref in expected]

    @contextmanager
    def _trainer(self, run: TrainedRun, version: int) -> Iterator[Trainer]:
        """The trainer of the only rank."""
        gang = GangFiles(run.directory, version, attempt=1, step_attempt=0)
        alone = RankAssignment(("t0",))
        with (
            join_gang(self.backend.meet, gang, alone, "127.0.0.1", 10.0) as ranks,
            self.backend.trainer_at(run, version, ranks) as trainer,
        ):
            yield trainer

    def _repeat(self, run: TrainedRun, iteration: int) -> list[str]:
        """Make the step of an iteration again, beside its weights; returns the checksums of the files."""
        with self._trainer(run, iteration) as trainer:
            assert trainer.version == iteration
            trainer.step(self.batch(iteration))
            folder = run.directory.path(f"again-{iteration}")
            return [ref.sha256 for ref in trainer.save_weights(folder, run.directory.version_dir(iteration))]

    def _step(self, run: TrainedRun, iteration: int) -> list[FileRef]:
        """Commit an iteration as the stages do; returns the files of the weights."""
        uri = f"{run.directory.partition('batches', iteration)}/batch-1.parquet"
        batch = run.directory.relative(parquet.write_table(uri, self.batch(iteration)))
        _commit(run, iteration, "filter", [batch])
        with self._trainer(run, iteration) as trainer:
            metrics = trainer.step(self.batch(iteration))
            version = trainer.version
            weights = trainer.save_weights(
                run.directory.weights_dir(version), run.directory.version_dir(iteration)
            )
            assert weights, "rank 0 gets the file of the weights"
            settings = run.config.train.model_dump(mode="json")
            outputs = [run.directory.relative(ref) for ref in weights]
            trainer.await_checkpoint()
            facts = {"settings": settings, "version": version, "device": "cpu"}
            _commit(run, iteration, "train", outputs, **facts, **metrics)
            if version % run.config.train.interval == 0:
                trainer.save_checkpoint(run.directory.checkpoint_dir(version))
        return weights


def _commit(run: TrainedRun, iteration: int, stage: str, outputs: list[FileRef], **data: Any) -> None:
    identity = {"run_id": run.directory.run_id, "iteration": iteration, "stage": stage, "attempt": 1}
    times = {"started_at": 0.0, "finished_at": 0.0}
    run.directory.commit_manifest(Manifest(**identity, outputs=outputs, data=times | data))
