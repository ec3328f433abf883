"""The engine that stays in its worker's process between leases, at rest, as the trainer does."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.protocol import Engine
from sf_core.engines.registry import make_engine


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
