"""The kinds of engines by the names that `engine.kind` gives them, and the engine that stays in its worker's
process between leases, at rest. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.protocol import Engine
from sf_core.settings import load_object


class ResidentEngine:
    def __init__(self, device: WorkerDevice) -> None:
        self._device = device
        self._resting: tuple[Hashable, Engine] | None = None
        """The settings that the engine was made for, and the engine; None while a lease has it."""

    @contextmanager
    def lend(self, config: RunConfig, start_dir: str, origin: str = "") -> Iterator[tuple[Engine, bool]]:
        """The engine for a run of these settings and this version 0, at rest, and whether it was made for
        this lease, so that its start takes longer than the next ones. It stays if the block succeeds, until a
        run with others wants one; else it is closed."""
        settings = (config.engine, config.emulation, config.policy)
        key = (start_dir, origin, *(part.model_dump_json() for part in settings))
        # an engine of other settings makes room for the new one
        if self._resting is not None and self._resting[0] != key:
            self.close()
        resident = self._resting
        is_new = resident is None
        self._resting = None
        engine = make_engine(config, start_dir, self._device) if resident is None else resident[1]
        try:
            yield engine, is_new
        except BaseException:
            engine.close()
            raise
        self._resting = (key, engine)

    def close(self) -> None:
        """Close the engine that rests here, if any."""
        resident = self._resting
        self._resting = None
        if resident is not None:
            resident[1].close()


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How engines of a kind are made, and what differs between kinds."""

    make: str
    """Reference to the function (RunConfig, start folder, WorkerDevice) -> Engine, imported in the process
    that has the device."""
    runs_policy: bool = False
    """Tokens come from the policy's network, so the engine needs real weights, and sequences must fit the
    context that the policy is for."""
    reserves_cache: bool = False
    """The engine reserves a KV cache for `max_running` sequences of `context_length` tokens."""
    needs_torch: bool = False
    """Rollout workers import torch before they are ready, so that no lease waits for it."""
    follows_grammars: bool = False
    """Answers can be held to a grammar."""
    supports_images: bool = False
    """Multimodal policies are shown the images of requests."""
    trainer: str = "torch"
    """The trainer backend where `train.backend` is empty."""
    limits: str | None = None
    """Reference to a `check_shape`, for an engine that cannot sample by every policy on this machine."""

    def check_shape(self, shape: Mapping[str, Any]) -> None:
        """Raises ValueError, one sentence, if the engine cannot sample by a policy of this shape, which is
        named as in Hugging Face's config.json, on the devices of this machine."""
        if self.limits is not None:
            load_object(self.limits)(shape)


ENGINES = {
    "torch": EngineKind(
        "sf_core.engines.torch.torch_engine:make_engine",
        runs_policy=True,
        reserves_cache=True,
        needs_torch=True,
        follows_grammars=True,
    ),
    # its cache is of the memory that it is given; requests for which there is no room wait
    "vllm": EngineKind(
        "sf_core.engines.vllm.factory:make_engine",
        runs_policy=True,
        follows_grammars=True,
        supports_images=True,
        limits="sf_core.engines.vllm.server:check_shape",
    ),
    "scripted": EngineKind("sf_core.engines.scripted:make_engine"),
    "emulated": EngineKind("benchmarks.emulation.device:make_engine", trainer="emulated"),
}


def engine_kind(config: RunConfig) -> EngineKind:
    return ENGINES[config.engine.kind]


def follows_grammars(config: RunConfig) -> bool:
    """Whether the engines of a run hold answers to grammars."""
    return engine_kind(config).follows_grammars and config.engine.vllm.follows_grammars


def make_engine(config: RunConfig, start_dir: str, device: WorkerDevice | None = None) -> Engine:
    """An engine of this configuration, at rest. `device`: its worker's, if it has one."""
    engine: Engine = load_object(engine_kind(config).make)(config, start_dir, device or WorkerDevice())
    return engine
