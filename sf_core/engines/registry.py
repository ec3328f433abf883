"""The kinds of engines by the names that `engine.kind` gives them. Imports no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sf_core.config import RunConfig
from sf_core.config.references import load_object
from sf_core.engines.protocol import Engine
from sf_core.types import WeightsRef


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How engines of a kind are made, and what differs between kinds."""

    make: str
    """Reference to the function (RunConfig, start folder, WeightsRef) -> Engine, imported in the process that
    makes one on its device."""
    runs_policy: bool
    """Tokens come from the policy's network, so the engine needs real weights, and sequences must fit the
    context that the policy is for."""
    reserves_cache: bool
    """The engine reserves a KV cache for `max_running` sequences of `context_length` tokens."""
    needs_torch: bool
    """Rollout workers import torch before they are ready, so that no lease waits for it."""
    trainer: str = "torch"
    """The trainer backend where `train.backend` is empty."""


ENGINES = {
    "torch": EngineKind(
        "sf_core.engines.torch.torch_engine:make_engine",
        runs_policy=True,
        reserves_cache=True,
        needs_torch=True,
    ),
    "scripted": EngineKind(
        "sf_core.engines.scripted:make_engine",
        runs_policy=False,
        reserves_cache=False,
        needs_torch=False,
    ),
    "emulated": EngineKind(
        "sf_core.engines.emulated_device:make_engine",
        runs_policy=False,
        reserves_cache=False,
        needs_torch=False,
        trainer="emulated",
    ),
}


def engine_kind(config: RunConfig) -> EngineKind:
    return ENGINES[config.engine.kind]


def engine_factory(config: RunConfig, start_dir: str) -> Callable[[WeightsRef], Engine]:
    """A function that makes engines of this configuration from published weights."""
    kind = engine_kind(config)

    def make(weights: WeightsRef) -> Engine:
        # libraries that compute take seconds to import: by now the lease has begun, and tells of it
        engine: Engine = load_object(kind.make)(config, start_dir, weights)
        return engine

    return make
