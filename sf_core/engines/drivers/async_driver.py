"""The driver of engines that sample by themselves: it runs on the engine's event loop, in the
thread of the lease, and sends each event of the engine as soon as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection, broadcast

from sf_core.engines import wire
from sf_core.engines.drivers.driver import MAX_SPAN_S, DataPlaneAddress, Driver, count_tokens, describe_error
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
        engine.emit = self._on_event
        self._unsent_chunks: list[Chunk] = []
        """Tokens to send to the data plane at once, or after the pause."""
        self._recorded_until = time.time()
        """Unix time up to which spans record the engine's work."""
        self._was_sampling = False
        """Whether the engine has been sampling since then."""
        self.failure = self._new_failure()
        """Gets the error that ends this connection, or the lease."""

    def run(self, act: Callable[[], Any]) -> Any:
        return self.engine.loop.run_until_complete(act())

    async def run_connection(self, address: DataPlaneAddress, hello: bytes) -> str:
        self.failure = self._new_failure()
        self._unsent_chunks.clear()
        with address.connecting():
            socket = await connect(address.url, **address.options)
        async with socket:
            # `broadcast` to one socket writes at once, in the order of calls
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
                    # its next start shows whether the engine works
                    await self.engine.rest()
                    self._awaited_weights = None
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
                self._send_unsent()
            case wire.Yield():
                await engine.abort()
                self._send_unsent()
                await engine.rest()
                self.version = None
        self._apply_frame(frame, received, version)
        self._send_unsent_unless_paused()
        self._record_work()

    def _new_failure(self) -> asyncio.Future[None]:
        failure = self.engine.loop.create_future()
        # an error that nobody retrieves would be logged
        failure.add_done_callback(asyncio.Future.exception)
        return failure

    def _on_event(self, event: Event) -> None:
        """Handle an event of the engine."""
        try:
            match event:
                case Chunk() if self._is_welcome:
                    if not self._unsent_chunks:
                        # one frame carries all tokens that come until the loop is idle
                        self.engine.loop.call_soon(self._send_unsent_unless_paused)
                    self._unsent_chunks.append(event)
                case WeightsRef(version) if version != self.version:
                    # what the former weights sampled, before the new version
                    self._send_unsent()
                    self._record_work()
                    before = self.version
                    self.version = version
                    self._send_updated(before, time.time(), event)
                    self._record_work()
                case WeightsRefusedError():
                    self._send_refused(event)
                case Exception():
                    is_sampling = self.version is not None and self.engine.num_requests > 0
                    self.version = None
                    self._unsent_chunks.clear()
                    if is_sampling and not isinstance(event, EngineLostError):
                        raise StepFailedError(describe_error(event)) from event
                    raise event
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)

    def _send_unsent_unless_paused(self) -> None:
        if not self._is_paused:
            self._send_unsent()

    def _send_unsent(self) -> None:
        chunks = self._unsent_chunks
        self._unsent_chunks = []
        self._record_work(count_tokens(chunks))
        self._send_chunks(chunks)

    def _record_work(self, tokens: int = 0) -> None:
        """Record the engine's work until now as a span, with the number of tokens that it sampled."""
        now = time.time()
        if self.version is not None:
            if self._was_sampling:
                self._spans.add_work(self._recorded_until, now, self.version, tokens)
            else:
                self._spans.add_late_tokens(tokens, self.version)
        self._recorded_until = now
        self._was_sampling = not self._is_idle
        if self._awaited_weights is not None:
            self._spans.record_load(self._is_idle)

    async def _next_frame(self, socket: Connection) -> wire.ToEngine:
        """The next frame. Raises the engine's failure if that comes first."""
        next_frame = asyncio.ensure_future(socket.recv())
        try:
            first: list[asyncio.Future[Any]] = [next_frame, self.failure]
            while not (await asyncio.wait(first, timeout=MAX_SPAN_S, return_when="FIRST_COMPLETED"))[0]:
                if self._was_sampling:
                    self._record_work()
                else:
                    self._spans.end_work()
            if self.failure.done():
                self.failure.result()
            frame = wire.read_from_data_plane(next_frame.result())
        finally:
            next_frame.cancel()
        if self._was_sampling:
            self._record_work()
        elif self._awaited_weights is None and self.version is not None:
            self._spans.add_wait(self._recorded_until, self._is_paused)
        return frame
