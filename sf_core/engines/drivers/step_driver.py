"""The driver of engines that step: a loop, in the thread of the lease, that alternates frames and steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from sf_core.engines import wire
from sf_core.engines.drivers.driver import BUSY_GAP_S, DataPlaneAddress, Driver, count_tokens, describe_error
from sf_core.engines.protocol import EngineLostError, StepEngine, StepFailedError, WeightsRefusedError
from sf_core.types import GenerationRequest, Sampling

log = logging.getLogger(__name__)

LOADING_POLL_S = 0.005
"""Interval of steps of an engine that is idle and waits for weights."""

_PROBE_STEPS = 4
"""Number of steps in which an engine must sample one token, to show that it works."""


class StepDriver(Driver):
    engine: StepEngine

    @property
    def version(self) -> int | None:
        return self.engine.version

    @property
    def has_work(self) -> bool:
        """Whether the engine is to step: it samples, or fetches weights."""
        return self._awaited_weights is not None or not self._is_idle

    def run(self, act: Callable[[], Any]) -> Any:
        return act()

    def run_connection(self, address: DataPlaneAddress, hello: bytes) -> str:
        with address.connecting():
            socket = connect(address.url, **address.options)
        with socket:
            self.send = socket.send
            self.send(hello)
            frame = wire.read_from_data_plane(socket.recv())
            try:
                while True:
                    self.handle(frame)
                    if isinstance(frame, wire.Yield):
                        return frame.reason
                    while (next_frame := self._next_frame(socket)) is None:
                        self.step()
                    frame = next_frame
            except (EngineLostError, StepFailedError) as error:
                socket.close(wire.ENGINE_FAILED, wire.fit_reason(str(error)))
                raise

    def handle(self, frame: wire.ToEngine) -> None:
        """Do what the data plane says; on `yield`, the engine rests afterwards."""
        engine = self.engine
        received = time.time()
        version = self.version
        match frame:
            case wire.Welcome(paused=is_paused) | wire.Pause(is_paused):
                (engine.pause if is_paused else engine.resume)()
            case wire.Abort(request_ids):
                chunks = engine.abort(request_ids)
                if version is not None:
                    self._spans.add_late_tokens(count_tokens(chunks), version)
                self._send_chunks(chunks)
            case wire.Yield():
                self._send_chunks(engine.abort())
                engine.rest()
        self._apply_frame(frame, received, version)

    def step(self) -> None:
        """Let the engine step, and report what it sampled or that it holds new weights."""
        before = self.version
        is_idle = self._is_idle
        started = time.time()
        try:
            chunks = self.engine.step()
        except WeightsRefusedError as error:
            return self._send_refused(error)
        except EngineLostError:
            raise
        except Exception as error:
            if before is None or is_idle or not self._can_still_sample():
                raise
            raise StepFailedError(describe_error(error)) from error
        if self.version == before:
            if before is not None and not is_idle:
                self._spans.add_work(started, time.time(), before, count_tokens(chunks))
            return self._send_chunks(chunks)
        if before is not None:
            self._spans.add_late_tokens(count_tokens(chunks), before)
        # what the former weights sampled, before the new version
        self._send_chunks(chunks)
        self._send_updated(before, started, None)

    def _can_still_sample(self) -> bool:
        """Whether the engine, after a step that failed, samples for a request that is known to be sound."""
        engine = self.engine
        probe = GenerationRequest("probe", [0], 0, 1, (), Sampling(temperature=0.0))
        try:
            engine.abort()
            engine.submit(probe)
            # the first step may take new weights and sample nothing
            return any(engine.step() for _ in range(_PROBE_STEPS))
        except Exception:
            log.exception("the engine cannot sample any more")
            return False
        finally:
            engine.abort()

    def _next_frame(self, socket: Connection) -> wire.ToEngine | None:
        """The next frame; None if there is none and the engine has something to do meanwhile."""
        is_loading = self._awaited_weights is not None
        is_idle = self._is_idle
        if is_loading:
            self._spans.record_load(is_idle)
        started = time.time()
        try:
            # a busy engine does not wait for frames
            timeout_s = 0.0
            if is_idle:
                timeout_s = LOADING_POLL_S if is_loading else BUSY_GAP_S
            frame = socket.recv(timeout=timeout_s)
        except TimeoutError:
            if is_loading or not is_idle:
                return None
            self._spans.end_work()
            frame = socket.recv()
            self._spans.add_wait(started, self._is_paused)
        return wire.read_from_data_plane(frame)
