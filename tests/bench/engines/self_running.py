"""An engine that samples by itself: a scripted one, stepped by a task of its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from sf_core.engines.protocol import Event, WeightsRefusedError
from sf_core.engines.scripted import ScriptedEngine
from sf_core.types import Chunk, GenerationRequest, WeightsRef

STEP_S = 0.0005


class SelfRunningEngine:
    """What the scripted engine raises or reports in a step is told."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.loop = asyncio.new_event_loop()
        self.emit: Callable[[Event], None] = lambda event: None
        self.engine = engine
        self._steps: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        return self.engine.num_requests

    def update_weights(self, weights: WeightsRef) -> None:
        self.engine.update_weights(weights)
        self._weights = weights
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step_on())

    def submit(self, request: GenerationRequest) -> None:
        self.engine.submit(request)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        self._tell_all(self.engine.abort(request_ids))

    async def pause(self) -> None:
        self.engine.pause()

    async def resume(self) -> None:
        self.engine.resume()

    async def rest(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.wait([self._steps])
        self.engine.rest()

    def close(self) -> None:
        self.loop.close()

    async def _step_on(self) -> None:
        while True:
            before = self.engine.version
            try:
                self._tell_all(self.engine.step())
            except WeightsRefusedError as error:
                self.emit(error)
            except Exception as error:
                return self.emit(error)
            if self.engine.version != before:
                self.emit(self._weights)
            await asyncio.sleep(STEP_S)

    def _tell_all(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.emit(chunk)
