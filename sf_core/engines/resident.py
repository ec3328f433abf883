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
        """What the engine was made for, and the engine; None while a lease has it."""

    @contextmanager
    def lend(self, config: RunConfig, start_dir: str, origin: str = "") -> Iterator[tuple[Engine, bool]]:
        """The engine for a run of these settings and this version 0, at rest, and whether it was made for
        this lease, so that its start takes longer than the next ones. It stays if the block succeeds, until a
        run with others wants one; else it is closed."""
        settings = (config.engine, config.emulation, config.policy)
        wanted = (start_dir, origin, *(part.model_dump_json() for part in settings))
        if self._resting is not None and self._resting[0] != wanted:
            self.close()
        kept = self._resting
        self._resting = None
        engine = make_engine(config, start_dir, self._device) if kept is None else kept[1]
        try:
            yield engine, kept is None
        except BaseException:
            engine.close()
            raise
        self._resting = (wanted, engine)

    def close(self) -> None:
        """Close the engine that rests here, if any."""
        kept = self._resting
        self._resting = None
        if kept is not None:
            kept[1].close()
