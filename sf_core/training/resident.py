"""The trainer that stays in its worker's process between iterations, and how a lost one catches up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sf_core.engines.torch.torch_engine import local_device
from sf_core.stages.run import Run, RunRef
from sf_core.training.stored_steps import stored_batch, stored_settings
from sf_core.training.torch.ranks import Ranks
from sf_core.training.torch.trainer import Trainer
from storage.checkpoints import has_checkpoint
from storage.files import local_folder

_resident: tuple[RunRef, str, Trainer] | None = None
"""The attempt, the process group, and the trainer that trains with them."""


@contextmanager
def trainer_at(run: Run, version: int, ranks: Ranks) -> Iterator[Trainer]:
    """A trainer that holds this version: the resident one, or one rebuilt. It stays if the block ends well.

    All ranks of a new process group rebuild theirs, so that they replay together."""
    global _resident
    place = (run.ref, ranks.group)
    kept, _resident = _resident, None  # a step that fails half-way leaves a trainer nobody may use
    trainer = kept[2] if kept is not None and kept[:2] == place and kept[2].version == version else None
    kept = None  # a device may not hold two
    if trainer is None:
        trainer = rebuild_trainer(run, version, ranks)
    trainer.config = run.config.train  # steps that were made again had those of their attempts
    yield trainer
    _resident = (*place, trainer)


def rebuild_trainer(run: Run, version: int, ranks: Ranks, device: str | None = None) -> Trainer:
    """A trainer that holds this version: from the last checkpoint up to it, and the stored batches since,
    each with the settings of its step (design 5.6). Nothing is sampled again, nothing is written. On this
    process's own device unless another is named.

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
