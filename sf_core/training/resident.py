"""The trainer that stays in its worker's process between iterations, and its rebuilding after a loss."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from sf_core.engines.torch.torch_engine import local_device
from sf_core.training.protocol import TrainedRun
from sf_core.training.stored_steps import stored_batch, stored_settings
from sf_core.training.torch.ranks import Ranks
from sf_core.training.torch.trainer import Trainer
from storage.checkpoints import has_checkpoint
from storage.files import local_folder

_resident: tuple[Hashable, str, Trainer] | None = None
"""Run reference of the attempt, name of the process group, and their trainer."""


@contextmanager
def trainer_at(run: TrainedRun, version: int, ranks: Ranks) -> Iterator[Trainer]:
    """The `trainer_at` of a TrainerBackend: the resident trainer, or a rebuilt one, which stays if the block
    succeeds.

    All ranks of a new process group rebuild their trainers, since replaying a step takes all of them."""
    global _resident
    place = (run.ref, ranks.group)
    kept, _resident = _resident, None  # a step that fails half-way leaves an unusable trainer
    trainer = kept[2] if kept is not None and kept[:2] == place and kept[2].version == version else None
    kept = None  # a device may have no room for two trainers
    if trainer is None:
        trainer = rebuild_trainer(run, version, ranks)
    trainer.config = run.config.train  # replayed steps used the settings of their own attempts
    yield trainer
    _resident = (*place, trainer)


def rebuild_trainer(run: TrainedRun, version: int, ranks: Ranks, device: str | None = None) -> Trainer:
    """A trainer that holds this version, rebuilt from the last checkpoint not after it and the stored batches
    since, each with the settings of its step. Nothing is sampled again or written. The default
    device is this process's own.

    Raises ValueError if the checkpoint or a batch is not as it was written."""
    trainer = Trainer(
        local_folder(run.start_dir),
        run.config.train,
        seed=run.config.seed,
        ranks=ranks,
        device=device or local_device(),
    )
    checkpoint = version
    while checkpoint > 0 and not has_checkpoint(run.directory.checkpoint_dir(checkpoint)):
        checkpoint -= 1
    if checkpoint:
        trainer.load_checkpoint(run.directory.checkpoint_dir(checkpoint))
    while trainer.version < version:
        trainer.config = stored_settings(run, trainer.version)
        trainer.step(stored_batch(run, trainer.version))
    return trainer
