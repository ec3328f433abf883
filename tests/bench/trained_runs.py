"""Run directories of runs that were really trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from sf_core.config import RunConfig
from sf_core.models.builtin import make_policy
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from storage import parquet
from storage.run_directory import RunDirectory
from tests.bench.runs import commit, configure
from tests.bench.training.batches import grouped_rows, make_batch

BATCHES = [make_batch(grouped_rows(2, 2), logprob=-4.0, seed=seed) for seed in range(3)]
SETTINGS: dict[str, Any] = {"iterations": 4, "checkpoint_every": 2}
"""Training settings of the fixture `trained_run`, a run at version 3 with a checkpoint of version 2."""


def train(run: RunDirectory, config: RunConfig, batches: list[pa.Table]) -> None:
    """Commit an iteration per batch, as the stages do, but without rollouts."""
    make_policy(run.start_dir, config.policy, config.seed)
    dtype = config.policy.dtype_name
    make_model = partial(TorchModel, run.start_dir, dtype=dtype)
    trainer = ModelTrainer(make_model, config.train, seed=config.seed, dtype=dtype)
    for iteration, batch in enumerate(batches):
        uri = f"{run.partition('batches', iteration)}/batch-1.parquet"
        commit(run, iteration, "filter", outputs=[run.relative(parquet.write_table(uri, batch))])
        metrics = trainer.step(batch)
        weights = trainer.save_weights(run.weights_dir(trainer.version), run.weights_dir(iteration))
        if trainer.version % config.train.interval == 0:
            trainer.save_checkpoint(run.checkpoint_dir(trainer.version))
        settings = config.train.model_dump(mode="json")
        data = {"version": trainer.version, "device": trainer.device, "settings": settings, **metrics}
        commit(run, iteration, "train", outputs=weights, data=data)
        commit(run, iteration, "publish", data={"version": trainer.version})
    trainer.await_checkpoint()


def train_run(folder: Path, settings: dict[str, Any], batches: list[pa.Table]) -> RunDirectory:
    """Train a run in the folder on the batches."""
    run = RunDirectory(str(folder / "trained"))
    train(run, configure(run, train=settings), batches)
    return run
