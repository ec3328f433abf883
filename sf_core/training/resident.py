"""The trainer that stays in its worker's process between iterations, and how a lost one catches up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sf_core.engines.torch_engine import local_device
from sf_core.run import Run
from sf_core.training.ranks import Ranks
from sf_core.training.trainer import Trainer
from storage.batches import read_batch
from storage.checkpoints import has_checkpoint
from storage.files import local_folder

_resident: tuple[str, str, Trainer] | None = None
"""The nonce of the attempt, the process group, and the trainer that trains with them."""


@contextmanager
def trainer_at(run: Run, version: int, ranks: Ranks) -> Iterator[Trainer]:
    """A trainer that holds this version: the resident one, or one rebuilt. It stays if the block ends well.

    All ranks of a new process group rebuild theirs, so that they replay together."""
    global _resident
    place = (run.ref.nonce, ranks.group)
    trainer = _resident[2] if _resident is not None and _resident[:2] == place else None
    _resident = None  # a step that fails half-way leaves a trainer nobody may use
    if trainer is None or trainer.version != version:
        trainer = rebuild_trainer(run, version, ranks)
    yield trainer
    _resident = (*place, trainer)


def rebuild_trainer(run: Run, version: int, ranks: Ranks) -> Trainer:
    """A trainer that holds this version: from the last checkpoint up to it, and the stored batches since
    (design 5.6). Nothing is sampled again, nothing is written."""
    rollout = run.config.rollout
    trainer = Trainer(
        local_folder(run.start_dir),
        run.config.train,
        seed=run.config.seed,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        ranks=ranks,
        device=local_device(),
    )
    checkpoint = version
    while checkpoint > 0 and not has_checkpoint(run.directory.checkpoint_dir(checkpoint)):
        checkpoint -= 1
    if checkpoint:
        trainer.load_checkpoint(run.directory.checkpoint_dir(checkpoint))
    while trainer.version < version:
        manifest = run.directory.read_manifest(trainer.version, "filter")
        assert manifest is not None
        trainer.step(read_batch(run.directory.path(manifest.outputs[0].uri)))
    return trainer
