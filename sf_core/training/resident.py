"""The trainer that stays in its worker's process between iterations, and how a lost one catches up."""

from __future__ import annotations

from sf_core.run import Run
from sf_core.training.trainer import Trainer
from storage.batches import read_batch
from storage.checkpoints import has_checkpoint
from storage.files import local_folder

_resident: tuple[str, Trainer] | None = None


def trainer_at(run: Run, version: int) -> Trainer:
    """A trainer that holds this version: the resident one, or one rebuilt from the last checkpoint by
    replaying stored batches (design 5.6); nothing is sampled again."""
    global _resident
    if _resident is not None and _resident[0] == run.ref.uri and _resident[1].version == version:
        return _resident[1]
    _resident = None  # a step that failed half-way leaves a trainer nobody may use
    rollout = run.config.rollout
    trainer = Trainer(
        local_folder(run.start_dir),
        run.config.train,
        seed=run.config.seed,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
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
    _resident = (run.ref.uri, trainer)
    return trainer
