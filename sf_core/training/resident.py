"""The trainer that stays in its worker's process between iterations, and its rebuilding after a loss."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from sf_core.engines.torch.torch_engine import local_device
from sf_core.reports.view import RunView
from sf_core.training.protocol import TrainedRun
from sf_core.training.registry import trainer_backend
from sf_core.training.stored_steps import stored_batch, stored_settings
from sf_core.training.torch.ranks import Ranks
from sf_core.training.torch.trained_model import ModelBackend, TrainedModel
from sf_core.training.torch.trainer import Trainer
from storage.files import local_folder
from storage.scratch import scratch_folder
from storage.tensors.checkpoints import has_checkpoint

log = logging.getLogger(__name__)

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
    else:
        trainer.held.wake()
    trainer.config = run.config.train  # replayed steps used the settings of their own attempts
    yield trainer
    _resident = (*place, trainer)


def rest() -> None:
    """The `rest` of a TrainerBackend."""
    if _resident is not None:
        _resident[2].held.rest()


def rebuild_trainer(run: TrainedRun, version: int, ranks: Ranks, device: str | None = None) -> Trainer:
    """A trainer that holds this version, rebuilt from the last sound checkpoint not after it and the stored
    batches since, each with the settings of its step. Nothing is sampled again or written. The default
    device is this process's own.

    Raises ValueError if a batch is not as it was written."""
    config, backend = run.config, cast(ModelBackend, trainer_backend(run.config))
    place = device or local_device()

    @contextmanager
    def reference(version: int) -> Iterator[TrainedModel]:
        with _policy_folder(run, version) as folder:
            yield backend.make_model(config, folder, ranks, place)

    def make_critic(ranks: Ranks) -> TrainedModel:
        return backend.make_model(config, local_folder(run.start_dir), ranks, place, values=True)

    trainer = Trainer(
        lambda ranks: backend.make_model(config, local_folder(run.start_dir), ranks, place),
        config.train,
        seed=config.seed,
        ranks=ranks,
        dtype=config.policy.dtype_name,
        references=reference,
        make_critic=make_critic if config.train.critic is not None else None,
    )
    # ranks that look for themselves may differ on one that is just being completed
    for checkpoint in ranks.gather(_complete_until(run, version))[0]:
        try:
            trainer.load_checkpoint(run.directory.checkpoint_dir(checkpoint))
            break
        except ValueError as error:
            log.warning("%s; the checkpoint before it is taken", error)
    if (steps := version - trainer.version) > 0:
        log.warning("version %d is made again from %d (train steps: %d)", version, trainer.version, steps)
    while trainer.version < version:
        trainer.config = stored_settings(run, trainer.version)
        trainer.step(stored_batch(run, trainer.version))
    return trainer


@contextmanager
def _policy_folder(run: TrainedRun, version: int) -> Iterator[str]:
    """A Hugging Face folder with a published policy, on this host."""
    start = local_folder(run.start_dir)
    if version == 0:
        yield start
        return
    if version not in run.directory.list_versions("weights"):
        kept = ", ".join(map(str, RunView(run.directory).kept_versions()))
        raise ValueError(
            f"{run.directory.weights_dir(version)}: is not there any more, and version {version} is the "
            f"reference of train.loss.kl in this step; these versions are kept: {kept}"
        )
    weights = local_folder(run.directory.weights_dir(version))
    with scratch_folder() as folder:
        for path in (*Path(start).iterdir(), *Path(weights).iterdir()):
            is_weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
            if path.is_file() and (path.parent == Path(weights)) == is_weights:
                Path(folder, path.name).symlink_to(path)
        yield folder


def _complete_until(run: TrainedRun, version: int) -> list[int]:
    """Versions up to this one that have a complete checkpoint, newest first."""
    versions = [found for found in run.directory.list_versions("checkpoints") if found <= version]
    return [found for found in reversed(versions) if has_checkpoint(run.directory.checkpoint_dir(found))]
