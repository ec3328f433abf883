"""Trainer backends by the names that `train.backend` gives them. Imports none of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.training.protocol import TrainerBackend


@dataclass(frozen=True, slots=True)
class TrainerKind:
    """Where a backend is, and what differs between backends."""

    module: str
    """A TrainerBackend, imported in the processes that train."""
    computes_weights: bool
    """Weights that an engine can load, and a trained policy, come out of it."""
    needs_torch: bool
    """Training workers import torch before they are ready."""


TRAINERS = {
    "torch": TrainerKind("sf_core.training.torch.backend", computes_weights=True, needs_torch=True),
    "emulated": TrainerKind("sf_core.training.emulated", computes_weights=False, needs_torch=False),
}


def trainer_kind(config: RunConfig) -> TrainerKind:
    """Raises ValueError if the engines need weights, and the trainer computes none."""
    engine = engine_kind(config)
    name = config.train.backend or engine.trainer
    kind = TRAINERS[name]
    if engine.runs_policy and not kind.computes_weights:
        raise ValueError(
            f"train.backend {name} computes no weights, which engine.kind {config.engine.kind} needs; "
            "leave train.backend out, or choose engine.kind emulated"
        )
    return kind


def trainer_backend(config: RunConfig) -> TrainerBackend:
    return cast(TrainerBackend, importlib.import_module(trainer_kind(config).module))
