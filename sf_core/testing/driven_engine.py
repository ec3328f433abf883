"""An engine in the hands of a test of its contract (testing.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

from sf_core.engines import wire
from sf_core.engines.drivers.async_driver import AsyncDriver
from sf_core.engines.drivers.serve import make_driver
from sf_core.engines.drivers.step_driver import StepDriver
from sf_core.engines.protocol import Engine, WeightsRefusedError
from sf_core.types import Chunk, GenerationRequest, WeightsRef

_MOMENT_S = 0.005
"""Longest time that an engine which samples by itself is given for what it reports next."""


class DrivenEngine:
    """An engine and its driver in the hands of a test, which is the data plane: what is done to the engine
    goes to the driver as frames, and what is known of it is what the driver has told in frames."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_paused = False
        self._begin_lease()

    def _begin_lease(self) -> None:
        self._driver = make_driver(self.engine)
        self._driver.send = self._hear
        self._version: int | None = None
        self._names: set[str] = set()
        self._chunks: list[Chunk] = []
        self._last: wire.FromEngine | None = None
        """The last frame that has no chunks."""
        self._is_welcome = False
        self._news = asyncio.Event()
        assert (self.version, self.engine.num_requests) == (None, 0)

    @property
    def version(self) -> int | None:
        """That which the driver told last."""
        assert self._version == self._driver.version
        return self._version

    @property
    def num_requests(self) -> int:
        """Requests whose end was not reported."""
        return len(self._names)

    def update_weights(self, weights: WeightsRef) -> None:
        self._tell(wire.Update(weights) if self._is_welcome else wire.Welcome(weights, self._is_paused))
        self._is_welcome = True

    def submit(self, request: GenerationRequest) -> None:
        """Raises ValueError if the engine cannot do it, after the driver has answered so."""
        names = {*self._names}
        self._names.add(request.request_id)
        self._tell(wire.Submit.of([request]))
        for refused in [c for c in self._chunks if c.request_id == request.request_id and c.fault]:
            self._chunks.remove(refused)
            self._names = names
            self.engine.submit(request)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        """What was not reported before, up to the end of these requests (None: all)."""
        self._tell(wire.Abort(None if request_ids is None else [*request_ids]))
        return self._take_chunks()

    def step(self) -> list[Chunk]:
        """What the driver reports next. An engine that samples by itself may be given a moment for it."""
        if isinstance(self._driver, StepDriver):
            self._do(self._driver.step)
        elif not self._chunks:
            self._do(self._wait_for_news)
        if not self._chunks and isinstance(self._last, wire.Refused):
            reason = self._last.reason
            self._last = None
            raise WeightsRefusedError(reason)
        return self._take_chunks()

    def wait(self, seconds: float) -> None:
        """Let so much time pass, in which an engine that samples by itself goes on."""
        sleep = time.sleep if isinstance(self._driver, StepDriver) else asyncio.sleep
        self._do(lambda: sleep(seconds))

    def pause(self) -> None:
        self._is_paused = True
        if self._is_welcome:
            self._tell(wire.Pause(True))
            assert isinstance(self._last, wire.EnginePaused)

    def resume(self) -> None:
        self._is_paused = False
        if self._is_welcome:
            self._tell(wire.Pause(False))

    def rest(self) -> None:
        """Have the engine yield."""
        if self._is_welcome:
            self._tell(wire.Yield("the test is over"))
            assert isinstance(self._last, wire.Yielded)
        self._end_lease()

    def close(self) -> None:
        self.engine.close()

    def _end_lease(self) -> None:
        self._driver.run(self._driver.engine.rest)
        self._begin_lease()

    def _tell(self, frame: wire.ToEngine) -> None:
        self._do(lambda: self._driver.handle(frame))

    def _do(self, act: Callable[[], Any]) -> None:
        """Have the driver do something. What it raises ends the lease."""
        try:
            self._driver.run(act)
            if isinstance(self._driver, AsyncDriver) and self._driver.failure.done() and not self._chunks:
                self._driver.failure.result()
        except Exception:
            self._end_lease()
            raise

    async def _wait_for_news(self) -> None:
        assert isinstance(self._driver, AsyncDriver)
        first: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._news.wait()), self._driver.failure]
        await asyncio.wait(first, timeout=_MOMENT_S, return_when="FIRST_COMPLETED")
        first[0].cancel()

    def _take_chunks(self) -> list[Chunk]:
        self._news.clear()
        chunks = self._chunks
        self._chunks = []
        return chunks

    def _hear(self, data: bytes) -> None:
        self._news.set()
        match wire.read_from_engine(data):
            case wire.Chunks(chunks):
                self._chunks += chunks
                self._names -= {chunk.request_id for chunk in chunks if chunk.finish_reason is not None}
            case frame:
                self._last = frame
                self._version = frame.version if isinstance(frame, wire.Updated) else self._version
