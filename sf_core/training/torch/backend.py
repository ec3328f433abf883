"""The torch backend: how its ranks meet, what they hold, and how a trainer is kept or rebuilt."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.torch.torch_engine import local_device
from sf_core.models.images.processor_config import read_image_processor
from sf_core.reports.view import RunView
from sf_core.training.backends import TrainedRun
from sf_core.training.stored_steps import read_stored_batch, read_stored_settings
from sf_core.training.teacher_folder import TeacherFolder, find_teacher, version_of
from sf_core.training.torch.ranks import Ranks, Rendezvous
from sf_core.training.torch.teaching import FrozenModels, Name
from sf_core.training.torch.torch_model import AdapterVersionModel, FrozenModel, TorchModel
from sf_core.training.torch.trained_model import DistributedModel, TrainedModel
from sf_core.training.torch.trainer import ModelTrainer
from sf_core.training.vision_tower import VisionTower
from storage.files import join, local_folder, read_bytes
from storage.tensors.checkpoints import has_checkpoint
from storage.tensors.weights import ADAPTER_CONFIG, load_adapter

log = logging.getLogger(__name__)


class TorchBackend:
    """A TrainerBackend. That of another network inherits it and makes another model."""

    keeps_frozen = True
    """Whether models that are not trained stay from step to step."""

    def __init__(self, device: WorkerDevice) -> None:
        self._rendezvous = Rendezvous()
        self.meet = self._rendezvous.meet
        self._resident: tuple[Hashable, str, ModelTrainer] | None = None
        """Run reference of the attempt, name of the process group, and their trainer; None during a step."""

    def make_model(
        self,
        config: RunConfig,
        model_dir: str,
        ranks: Ranks,
        device: str,
        *,
        values: bool = False,
        adapter: str | None = None,
        tower: VisionTower | None = None,
    ) -> TrainedModel:
        """The model that these ranks train from the weights of a Hugging Face folder. `values`: a critic,
        which gives the value of each trained token in the place of its log-prob. `adapter`: the folder of
        one that is trained while the weights stay. `tower`: what shows images to the model."""
        return TorchModel(
            model_dir,
            ranks,
            device=device,
            dtype=config.policy.dtype_name,
            recompute=config.train.recompute,
            values=values,
            adapter=adapter,
            tower=tower,
        )

    def make_frozen(
        self, config: RunConfig, model_dir: str, ranks: Ranks, device: str, **choices: Any
    ) -> DistributedModel:
        """A model that these ranks hold and do not train, in the policy's dtype unless the choices, which are
        those of FrozenModel, name another."""
        choices = {"dtype": config.policy.dtype_name, **choices}
        return FrozenModel(model_dir, ranks, device=device, **choices)

    @contextmanager
    def trainer_at(self, run: TrainedRun, version: int, ranks: Ranks) -> Iterator[ModelTrainer]:
        """The resident trainer, or a rebuilt one, which stays if the block succeeds. All ranks of a new
        process group rebuild their trainers, since replaying a step takes all of them."""
        ranks_of_run = (run.ref, ranks.group)
        # a step that fails half-way leaves an unusable trainer
        resident = self._resident
        self._resident = None
        trainer = (
            resident[2]
            if resident is not None and resident[:2] == ranks_of_run and resident[2].version == version
            else None
        )
        resident = None  # a device may have no room for two trainers
        if trainer is None:
            trainer = self.rebuild_trainer(run, version, ranks)
        else:
            trainer.wake()
        trainer.config = run.config.train  # replayed steps used the settings of their own attempts
        yield trainer
        self._resident = (*ranks_of_run, trainer)

    def rest(self) -> None:
        if self._resident is not None:
            self._resident[2].rest()

    def close(self) -> None:
        self._resident = None
        self._rendezvous.close()

    def rebuild_trainer(
        self, run: TrainedRun, version: int, ranks: Ranks, device: str | None = None
    ) -> ModelTrainer:
        """A trainer that holds this version, rebuilt from the last sound checkpoint not after it and the
        stored batches since, each with the settings of its step. Nothing is sampled again or written. The
        default device is this process's own.

        Raises ValueError if a batch is not as it was written."""
        config = run.config
        start = local_folder(run.directory.start_dir)
        where = device or local_device()
        is_multimodal = read_image_processor(start) is not None
        media = run.directory.media_dir
        dtype = getattr(torch, config.policy.dtype_name)
        tower = VisionTower(start, media, where, dtype) if is_multimodal else None
        make_model = partial(self.make_model, config, device=where, tower=tower)
        adapter = None if config.train.lora is None else run.directory.start_adapter_dir

        def load(name: Name, trained: TrainedModel) -> tuple[DistributedModel, str]:
            make_frozen = partial(self.make_frozen, config, ranks=ranks, device=where)
            if isinstance(name, str):
                teacher, digest = _find_teacher(run, name, ranks)
                teacher_tower = (
                    VisionTower(local_folder(teacher.source), media, where) if is_multimodal else None
                )
                with teacher.open() as (folder, its_adapter):
                    return make_frozen(folder, dtype="auto", adapter=its_adapter, tower=teacher_tower), digest
            if name:
                _refuse_missing(run, name)
            if adapter is not None:
                assert isinstance(trained, TorchModel)
                return AdapterVersionModel(trained, load_adapter(run.directory.version_dir(name))), ""
            with version_of(run.directory, name).open() as (folder, _):
                return make_frozen(folder, tower=tower), ""

        trainer = ModelTrainer(
            partial(make_model, start, adapter=adapter),
            config.train,
            seed=config.seed,
            ranks=ranks,
            dtype=config.policy.dtype_name,
            frozen=FrozenModels(load, keeps=self.keeps_frozen),
            make_critic=partial(make_model, start, values=True) if config.train.critic is not None else None,
            adapter=b"" if adapter is None else read_bytes(join(adapter, ADAPTER_CONFIG)),
            base="" if adapter is None else _digest_start(run),
        )
        # ranks that look for themselves may differ on one that is just being completed
        for checkpoint in ranks.gather(_complete_until(run, version))[0]:
            try:
                trainer.load_checkpoint(run.directory.checkpoint_dir(checkpoint))
                break
            except ValueError as error:
                log.warning("%s; the previous checkpoint is used", error)
        if (steps := version - trainer.version) > 0:
            log.warning(
                ("version %d is computed again from version %d (train steps: %d)"),
                version,
                trainer.version,
                steps,
            )
        while trainer.version < version:
            trainer.config = read_stored_settings(run, trainer.version)
            trainer.step(read_stored_batch(run, trainer.version))
        return trainer


def _find_teacher(run: TrainedRun, name: str, ranks: Ranks) -> tuple[TeacherFolder, str]:
    """The teacher of this name and its digest. Raises ValueError on all ranks if one of them has none or
    another one, or if another one taught an earlier step of the run."""
    try:
        teacher = find_teacher(name)
        digest = teacher.digest()
        fault = ""
    except ValueError as error:
        digest = ""
        fault = str(error)
    of_ranks = ranks.gather((digest, fault))
    if faults := [fault for _, fault in of_ranks if fault]:
        raise ValueError(faults[0])
    if any(of_rank != digest for of_rank, _ in of_ranks):
        raise ValueError(f"train.teacher.model: {name} is not the same model on every training worker")
    for iteration in count():
        manifest = run.directory.read_manifest(iteration, "train")
        if manifest is None or (before := manifest.data.get("teacher")) == digest:
            break
        if before is not None:
            raise ValueError(
                f"train.teacher.model: {name} is not the model that taught iteration {iteration}: restore "
                "the earlier setting or files to continue"
            )
    return teacher, digest


def _refuse_missing(run: TrainedRun, version: int) -> None:
    if version not in run.directory.list_versions("weights"):
        stored = ", ".join(map(str, RunView(run.directory).list_stored_versions()))
        raise ValueError(
            f"{run.directory.weights_dir(version)} no longer exists, but version {version} is the reference "
            f"of train.loss.kl in this step; stored versions: {stored}"
        )


def _digest_start(run: TrainedRun) -> str:
    """A digest of the weights in the start folder, by the checksums of their files."""
    manifest = run.directory.read_manifest(None, "start")
    assert manifest is not None, "the start must be committed first"
    digests: dict[str, str] = {}
    for ref in manifest.outputs:
        if ref.uri.endswith(".safetensors") and "/adapter/" not in ref.uri:
            digests[ref.uri] = ref.sha256
    lines = [f"{digest} {uri}" for uri, digest in sorted(digests.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _complete_until(run: TrainedRun, version: int) -> list[int]:
    """Versions up to this one that have a complete checkpoint, newest first."""
    versions = [stored for stored in run.directory.list_versions("checkpoints") if stored <= version]
    return [stored for stored in reversed(versions) if has_checkpoint(run.directory.checkpoint_dir(stored))]
