"""The engine that stays in its worker's process between leases, at rest, as the trainer does."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sf_core.config import RunConfig
from sf_core.engines.protocol import Engine
from sf_core.engines.registry import make_engine


class Kept(NamedTuple):
    engine: Engine
    is_new: bool
    """It was made for this lease, so that its start takes longer than the next ones."""


_resident: tuple[Hashable, Engine] | None = None
"""What the engine was made for, and the engine."""


@contextmanager
def engine_of(config: RunConfig, start_dir: str, origin: str = "") -> Iterator[Kept]:
    """This process's engine for a run of these settings and this version 0, at rest. It stays if the block
    succeeds, until a run with others wants one; else it is closed."""
    global _resident
    settings = (config.engine, config.emulation, config.policy)
    wanted = (start_dir, origin, *(part.model_dump_json() for part in settings))
    kept, _resident = _resident, None
    if kept is not None and kept[0] != wanted:
        kept[1].close()
        kept = None
    engine = make_engine(config, start_dir) if kept is None else kept[1]
    try:
        yield Kept(engine, kept is None)
    except BaseException:
        engine.close()
        raise
    _resident = (wanted, engine)
