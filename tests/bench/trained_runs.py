"""Run directories of runs that were really trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.models.builtin import make_policy
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import SingleRank
from storage.files import describe, list_files
from storage.run_directory import RunDirectory
from storage.tables import parquet
from tests.bench.runs import commit, configure
from tests.bench.training.adapters import draw_adapter
from tests.bench.training.batches import grouped_rows, make_batch

BATCHES = [make_batch(grouped_rows(2, 2), logprob=-4.0, seed=seed) for seed in range(3)]
SETTINGS: dict[str, Any] = {"iterations": 4, "checkpoint_every": 2}
"""Training settings of the fixture `trained_run`, a run at version 3 with a checkpoint of version 2."""


def start(run: RunDirectory, config: RunConfig, **adapter: Any) -> None:
    """Commit a start folder, with an adapter if the run trains one, which `draw_adapter` makes."""
    make_policy(run.start_dir, config.policy, config.seed)
    if config.train.lora is not None:
        draw_adapter(run.start_adapter_dir, run.start_dir, **adapter)
        outputs = [
            describe(uri) for folder in (run.start_dir, run.start_adapter_dir) for uri in list_files(folder)
        ]
        commit(run, None, "start", outputs=outputs)


def train(run: RunDirectory, config: RunConfig, batches: list[pa.Table]) -> None:
    """Commit an iteration per batch, as the stages do, but without rollouts."""
    start(run, config)
    opened = OpenRun(RunRef(run.run_id, run.uri, dataplane_url="", attempt=0))
    trainer = TorchBackend(WorkerDevice()).rebuild_trainer(opened, 0, SingleRank(), "cpu")
    for iteration, batch in enumerate(batches):
        uri = f"{run.partition('batches', iteration)}/batch-1.parquet"
        commit(run, iteration, "filter", outputs=[run.relative(parquet.write_table(uri, batch))])
        metrics = trainer.step(batch)
        weights = trainer.save_weights(run.weights_dir(trainer.version), run.version_dir(iteration))
        if trainer.version % config.train.interval == 0:
            trainer.save_checkpoint(run.checkpoint_dir(trainer.version))
        settings = config.train.model_dump(mode="json")
        data = {"version": trainer.version, "device": trainer.device, "settings": settings, **metrics}
        if digest := trainer.teacher_digest:
            data["teacher"] = digest
        commit(run, iteration, "train", outputs=weights, data=data)
        commit(run, iteration, "publish", data={"version": trainer.version})
    trainer.await_checkpoint()


def train_run(
    folder: Path, settings: dict[str, Any], batches: list[pa.Table], **sections: Any
) -> RunDirectory:
    """Train a run in the folder on the batches."""
    run = RunDirectory(str(folder / "trained"))
    train(run, configure(run, train=settings, **sections), batches)
    return run
