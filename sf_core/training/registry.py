"""Trainer backends by the names that `train.backend` gives them. Imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sf_core.config import RunConfig, TrainConfig
from sf_core.engines.registry import engine_kind
from sf_core.scheduling.worker_state import WorkerState
from sf_core.settings import load_object
from sf_core.training.protocol import TrainerBackend


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
