"""What a rollout lease runs: an engine, served by its driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from sf_core.engines import wire
from sf_core.engines.drivers.async_driver import AsyncDriver
from sf_core.engines.drivers.driver import Recorder
from sf_core.engines.drivers.step_driver import StepDriver
from sf_core.engines.protocol import AsyncEngine, Engine, StepEngine


def serve_engine(
    url: str,
    key: str | None,
    hello: wire.Hello,
    engine: Engine,
    recorder: Recorder | None = None,
    *,
    patience_s: float = 60.0,
    on_ready: Callable[[], None] = lambda: None,
) -> str:
    """Serve one lease until told to yield; returns the reason that was given.

    The engine, at rest before and after, takes the weights that the data plane wants; `on_ready` is called
    when it holds them. The recorder gets every span of sampling, loading, yielding and waiting. A connection
    that breaks is made again, and so is a lost engine; raises ConnectionError once `patience_s` have passed
    since the connection broke, and ValueError if the data plane ended it because of what the engine sent. If
    the engine fails at its requests it gives them back, and goes on if it still works. What else it raises
    ends the lease.
    """
    return make_driver(engine, recorder, on_ready).serve(url, key, hello, patience_s)


def make_driver(
    engine: Engine, recorder: Recorder | None = None, on_ready: Callable[[], None] = lambda: None
) -> StepDriver | AsyncDriver:
    """The driver of an engine: an engine that has a method `step` is driven by steps."""
    if isinstance(engine, StepEngine):
        return StepDriver(engine, recorder, on_ready)
    return AsyncDriver(cast(AsyncEngine, engine), recorder, on_ready)
