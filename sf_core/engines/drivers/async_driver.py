"""The driver of engines that sample by themselves: it lives on the engine's event loop, which runs in the
thread of the lease, and sends what the engine tells as it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection, broadcast

from sf_core.engines import wire
from sf_core.engines.drivers.connection import Line
from sf_core.engines.drivers.driver import Driver, explain, num_tokens
from sf_core.engines.drivers.spans import MAX_SPAN_S
from sf_core.engines.protocol import (
    AsyncEngine,
    EngineLostError,
    Event,
    StepFailedError,
    WeightsRefusedError,
)
from sf_core.types import Chunk, WeightsRef


class AsyncDriver(Driver):
    engine: AsyncEngine
    version: int | None = None

    def __init__(self, engine: AsyncEngine, *more: Any) -> None:
        super().__init__(engine, *more)
        engine.tell = self._hear
        self._due: list[Chunk] = []
        """Tokens that the data plane is told of at once, or after the pause."""
        self._recorded_until = time.time()
        self._has_worked = False
        """Until when spans tell what it did, and whether it samples since then."""
        self.failure = self._expect_failure()
        """Gets what ends this connection, or the lease."""

    def run(self, act: Callable[[], Any]) -> Any:
        return self.engine.loop.run_until_complete(act())

    async def converse(self, line: Line, hello: bytes) -> str:
        self.failure = self._expect_failure()
        self._due.clear()
        with line.open():
            socket = await connect(line.url, **line.options)
        async with socket:
            # for one socket: it writes at once, in the order of calls
            self.send = partial(broadcast, [socket])
            self.send(hello)
            frame = wire.read_from_data_plane(await socket.recv())
            try:
                while True:
                    await self.handle(frame)
                    if isinstance(frame, wire.Yield):
                        return frame.reason
                    frame = await self._next_frame(socket)
            except (EngineLostError, StepFailedError) as error:
                await socket.close(wire.ENGINE_FAILED, wire.fit_reason(str(error)))
                if isinstance(error, StepFailedError):
                    # it is started anew, which shows whether it works
                    await self.engine.rest()
                    self._awaited = None
                raise

    async def handle(self, frame: wire.ToEngine) -> None:
        """Do what the data plane says; on `yield`, the engine rests afterwards."""
        engine = self.engine
        received = time.time()
        version = self.version
        match frame:
            case wire.Welcome(paused=is_paused) | wire.Pause(is_paused):
                await (engine.pause() if is_paused else engine.resume())
            case wire.Abort(request_ids):
                await engine.abort(request_ids)
                self._report()
            case wire.Yield():
                await engine.abort()
                self._report()
                await engine.rest()
                self.version = None
        self._follow(frame, received, version)
        self._report_unless_paused()
        self._record()

    def _expect_failure(self) -> asyncio.Future[None]:
        failure = self.engine.loop.create_future()
        # or it would be logged where nobody waits for it any more
        failure.add_done_callback(asyncio.Future.exception)
        return failure

    def _hear(self, event: Event) -> None:
        """What the engine tells."""
        try:
            match event:
                case Chunk() if self._is_welcome:
                    if not self._due:
                        # with all that is told before
                        self.engine.loop.call_soon(self._report_unless_paused)
                    self._due.append(event)
                case WeightsRef(version) if version != self.version:
                    # what the former weights sampled, before the new version
                    self._report()
                    self._record()
                    before = self.version
                    self.version = version
                    self._tell_updated(before, time.time(), event)
                    self._record()
                case WeightsRefusedError():
                    self._tell_refused(event)
                case Exception():
                    is_sampling = self.version is not None and self.engine.num_requests > 0
                    self.version = None
                    self._due.clear()
                    if is_sampling and not isinstance(event, EngineLostError):
                        raise StepFailedError(explain(event)) from event
                    raise event
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)

    def _report_unless_paused(self) -> None:
        if not self._is_paused:
            self._report()

    def _report(self) -> None:
        chunks = self._due
        self._due = []
        self._record(num_tokens(chunks))
        self._tell_chunks(chunks)

    def _record(self, tokens: int = 0) -> None:
        """Have spans tell what it did until now, and that it sampled so many tokens."""
        now = time.time()
        if self.version is not None:
            if self._has_worked:
                self._spans.add_work(self._recorded_until, now, self.version, tokens)
            else:
                self._spans.give_back(tokens, self.version)
        self._recorded_until = now
        self._has_worked = not self._is_idle
        if self._awaited is not None:
            self._spans.note_load(self._is_idle)

    async def _next_frame(self, socket: Connection) -> wire.ToEngine:
        """The next frame. Raises what the engine tells meanwhile that ends it."""
        coming = asyncio.ensure_future(socket.recv())
        try:
            first: list[asyncio.Future[Any]] = [coming, self.failure]
            while not (await asyncio.wait(first, timeout=MAX_SPAN_S, return_when="FIRST_COMPLETED"))[0]:
                if self._has_worked:
                    self._record()
                else:
                    self._spans.end_work()
            if self.failure.done():
                self.failure.result()
            frame = wire.read_from_data_plane(coming.result())
        finally:
            coming.cancel()
        if self._has_worked:
            self._record()
        elif self._awaited is None and self.version is not None:
            self._spans.add_wait(self._recorded_until, self._is_paused)
        return frame
