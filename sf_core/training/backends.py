"""The interface of trainer backends, what they ask of the run whose policy they train, and the backends by
the names that `train.backend` gives them. Imports none of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import pyarrow as pa

from sf_core.config import RunConfig, TrainConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.registry import engine_kind
from sf_core.scheduling.worker_state import WorkerState
from sf_core.settings import load_object
from sf_core.training.gang import RankAssignment
from storage.files import FileRef
from storage.gangs import GangFiles
from storage.run_directory import RunDirectory


class TrainedRun(Protocol):
    """An open run; `sf_core.stages.run.OpenRun` is one."""

    directory: RunDirectory

    @property
    def config(self) -> RunConfig: ...

    @property
    def ref(self) -> Hashable:
        """Names the run and the attempt that works on it."""


class Trainer(Protocol):
    """One rank of a step. Every rank makes the same calls with the same arguments."""

    @property
    def version(self) -> int:
        """Policy version that the trainer holds."""
        ...

    @property
    def device(self) -> str:
        """Kind of the device, on which the rounding of a step depends."""
        ...

    @property
    def teacher_digest(self) -> str:
        """Digest of the model that taught in the last step beside the batch; empty if none did."""
        ...

    def step(self, batch: pa.Table) -> dict[str, float]:
        """Train on a batch of storage.tables.batches, which makes the next version. Returns the metrics of
        the step, the same on every rank; after an error the trainer is not used again."""
        ...

    def compare_engines(self, batch: pa.Table, stored: Collection[int]) -> dict[str, float]:
        """Called after the step on this batch, with the versions whose weights are stored. Returns metrics of
        how far the log-probs that engines reported of an earlier version are from those of its weights, the
        same on every rank; empty if that cannot be told."""
        ...

    def save_weights(self, folder: str, before: str) -> list[FileRef]:
        """Store the weights of the version held, and what helps engines to come from the version before,
        whose folder may be gone. Returns the files on rank 0, that of the weights first, none on the others;
        what each rank writes is the backend's choice."""
        ...

    def save_checkpoint(self, folder: str) -> None:
        """Begin to store what `trainer_at` needs beside the run's batches to hold this version again, bit for
        bit. Called once the version is committed; the next step does not change what is stored."""
        ...

    def await_checkpoint(self) -> None:
        """Return when no checkpoint is being stored; raises the error of the one that was."""
        ...


class TrainerBackend(Protocol):
    """A way to train, named in training/backends.py. A worker keeps one object of it from step to step."""

    def __init__(self, device: WorkerDevice) -> None: ...

    def meet(
        self, files: GangFiles, assignment: RankAssignment, host: str, timeout_s: float
    ) -> AbstractContextManager[Any]:
        """Meet the other ranks of the try; gives the block what `trainer_at` takes as `ranks`, and ends when
        rank 0 has finished its block. Raises GangError, naming ranks that are missing or have failed; no wait
        exceeds `timeout_s`."""
        ...

    def trainer_at(self, run: TrainedRun, version: int, ranks: Any) -> AbstractContextManager[Trainer]:
        """This rank's trainer, which holds the version whatever was lost: kept, loaded, or
        rebuilt from stored batches. Its next step uses the settings of the run."""
        ...

    def rest(self) -> None:
        """Give back the memory that the kept trainer has on its device, which is lent. The next `trainer_at`
        takes it again."""
        ...

    def close(self) -> None:
        """Give up what is kept. What a running step uses ends with the step."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerKind:
    """Where a backend is, and what differs between backends."""

    backend: str
    """Reference to a TrainerBackend, imported in the processes that train."""
    computes_weights: bool
    """Weights that an engine can load, and a trained policy, come out of it. Its workers import torch before
    they are ready."""
    extra: str | None = None
    """The optional dependencies of ours that it needs, by the name under which it imports them."""
    limits: str | None = None
    """Reference to a `check_shape`, for a backend that cannot train every policy."""

    def check_shape(self, shape: Mapping[str, Any], settings: TrainConfig) -> None:
        """Raises ValueError, one sentence, if the backend cannot train a policy of this shape, which is named
        as in Hugging Face's config.json, with these settings."""
        if self.limits is not None:
            load_object(self.limits)(shape, settings)


TRAINERS = {
    "torch": TrainerKind("sf_core.training.torch.backend:TorchBackend", computes_weights=True),
    "megatron": TrainerKind(
        "sf_core.training.megatron.backend:MegatronBackend",
        computes_weights=True,
        extra="megatron",
        limits="sf_core.training.megatron.limits:check_shape",
    ),
    "emulated": TrainerKind("benchmarks.emulation.trainer:EmulatedBackend", computes_weights=False),
}


def trainer_kind(config: RunConfig) -> TrainerKind:
    """Raises ValueError if the engines need weights, and the trainer computes none."""
    engine = engine_kind(config)
    name = config.train.backend or engine.trainer
    kind = TRAINERS[name]
    if engine.runs_policy and not kind.computes_weights:
        raise ValueError(
            f"train.backend {name} computes no weights, but engine.kind {config.engine.kind} needs "
            "weights; leave train.backend out, or choose engine.kind emulated"
        )
    return kind


def check_installed(config: RunConfig) -> None:
    """Raises FileNotFoundError, one sentence, if this Python lacks what engines or trainers import."""
    if config.engine.kind == "emulated" and importlib.util.find_spec("benchmarks") is None:
        raise FileNotFoundError(
            "engine.kind emulated needs the package benchmarks, which only a clone of SeamlessFlow has: "
            "start the run in a clone"
        )
    extra = trainer_kind(config).extra
    if extra and importlib.util.find_spec(extra) is None:
        raise FileNotFoundError(
            f"train.backend {extra} needs {extra}-core, which this Python does not have: "
            f"it comes with the extra [{extra}] of seamlessflow"
        )


def trainer_backend(config: RunConfig, worker: WorkerState) -> TrainerBackend:
    """The backend that the configuration names. The worker keeps it until a run with another one trains."""
    check_installed(config)
    backend = load_object(trainer_kind(config).backend)
    if type(worker.trainer) is not backend:
        if worker.trainer is not None:
            worker.trainer.close()
        worker.trainer = backend(worker.device)
    return cast(TrainerBackend, worker.trainer)
