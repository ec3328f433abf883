"""The contract of trainer backends, as tests: a test class inherits from TrainerTests and names its backend.

Needs no pytest. A pytest fixture of the subclass may set what its methods need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from sf_core.training.gang import RankAssignment
from sf_core.training.protocol import TrainedRun, Trainer, TrainerBackend
from sf_core.training.seating import seated
from storage import parquet
from storage.files import FileRef
from storage.gangs import GangFiles
from storage.manifests import Manifest

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
        first, second = self._step(run, 0), self._step(run, 1)
        assert first.uri.startswith(run.directory.weights_dir(1))
        assert second.uri.startswith(run.directory.weights_dir(2))
        assert first.sha256 != second.sha256

    def test_a_trainer_that_was_lost_goes_on_with_equal_weights(self) -> None:
        run = self.begin(attempt=1)
        last = [self._step(run, iteration) for iteration in range(3)][-1]
        # what the trainer of another attempt holds does not count
        with self._trainer(self.begin(attempt=2), 2) as trainer:
            assert trainer.version == 2
            trainer.step(self.batch(2))
            again = trainer.save_weights(run.directory.path("again"))
        assert again is not None and again.sha256 == last.sha256

    def test_a_step_that_failed_is_made_again_from_the_version_before(self) -> None:
        run = self.begin(attempt=1)
        expected = self._step(run, 0)
        run = self.begin(attempt=2)
        try:
            with self._trainer(run, 0) as trainer:
                trainer.step(self.batch(0))
                raise InterruptedError
        except InterruptedError:
            pass
        with self._trainer(run, 0) as trainer:
            assert trainer.version == 0
            trainer.step(self.batch(0))
            again = trainer.save_weights(run.directory.path("again"))
        assert again is not None and again.sha256 == expected.sha256

    @contextmanager
    def _trainer(self, run: TrainedRun, version: int) -> Iterator[Trainer]:
        """The trainer of the only rank."""
        files = GangFiles(run.directory, version, attempt=1, epoch=0)
        alone = RankAssignment(("t0",))
        with (
            seated(self.backend.meet, files, alone, "127.0.0.1", 10.0) as ranks,
            self.backend.trainer_at(run, version, ranks) as trainer,
        ):
            yield trainer

    def _step(self, run: TrainedRun, iteration: int) -> FileRef:
        """Commit an iteration as the stages do; returns the weights."""
        uri = f"{run.directory.partition('batches', iteration)}/batch-1.parquet"
        batch = run.directory.relative(parquet.write_table(uri, self.batch(iteration)))
        _commit(run, iteration, "filter", batch)
        with self._trainer(run, iteration) as trainer:
            metrics = trainer.step(self.batch(iteration))
            weights = trainer.save_weights(run.directory.weights_dir(trainer.version))
            assert weights is not None, "rank 0 gets the file of the weights"
            if trainer.version % run.config.train.checkpoint_every == 0:
                trainer.save_checkpoint(run.directory.checkpoint_dir(trainer.version))
        settings = run.config.train.model_dump(mode="json")
        _commit(run, iteration, "train", run.directory.relative(weights), settings=settings, **metrics)
        return weights


def _commit(run: TrainedRun, iteration: int, stage: str, output: FileRef, **data: Any) -> None:
    known = {"run_id": run.directory.run_id, "iteration": iteration, "stage": stage, "attempt": 1}
    run.directory.commit_manifest(Manifest(**known, outputs=[output], data=data))
