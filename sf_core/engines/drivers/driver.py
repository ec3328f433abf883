"""What both drivers do: they serve a lease over as many connections as necessary, and do what the data
plane's frames say. They decide nothing: the data plane routes, pauses and revokes; the engine samples.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tenacity import Retrying, retry_if_exception_type, wait_random_exponential
from websockets.exceptions import ConnectionClosed

from sf_core.engines import wire
from sf_core.engines.drivers.connection import DataPlaneAddress
from sf_core.engines.drivers.spans import NoRecorder, Recorder, Spans
from sf_core.engines.protocol import EngineLostError, StepFailedError, WeightsRefusedError
from sf_core.types import Chunk, GenerationRequest, WeightsRef

log = logging.getLogger(__name__)


class Driver(ABC):
    """One engine under one lease: it does what each frame says, and reports to the data plane."""

    def __init__(
        self, engine: Any, recorder: Recorder | None = None, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self._on_ready = on_ready
        self.send: Callable[[bytes], object]
        """Sends a frame to the data plane, over the current connection."""
        self._spans = Spans(recorder or NoRecorder())
        self._awaited_weights: WeightsRef | None = None
        """Weights that the engine is fetching."""
        self._welcome_version = 0
        """Version without which the data plane gives it no requests over this connection."""
        self._is_welcome = False
        self._is_paused = False
        self._disconnected_since = time.monotonic()
        """Monotonic time since which no data plane has welcomed the engine."""

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Policy version that the data plane has been or will be told of; None at rest."""

    @abstractmethod
    def run_connection(self, address: DataPlaneAddress, hello: bytes) -> Any:
        """Serve over one connection until told to yield; returns the reason that was given."""

    @abstractmethod
    def run(self, act: Callable[[], Any]) -> Any:
        """Call a method of the engine or of this driver, which may be a coroutine; returns its result."""

    def serve(self, url: str, key: str | None, hello: wire.Hello, patience_s: float) -> str:
        retrying = Retrying(
            # an engine that cannot read its weights raises OSError too: that must end the lease
            retry=retry_if_exception_type(ConnectionError),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            stop=lambda _: time.monotonic() - self._disconnected_since > patience_s,
            reraise=True,
        )
        try:
            return retrying(self._serve_once, DataPlaneAddress(url, key), hello)
        finally:
            self.run(self.engine.rest)

    def _serve_once(self, address: DataPlaneAddress, hello: wire.Hello) -> str:
        try:
            reason: str = self.run(lambda: self.run_connection(address, wire.pack(hello)))
            return reason
        except ConnectionClosed as error:
            raise address.interpret_close(error) from error
        except EngineLostError as error:
            log.warning("engine %s was lost and is restarted: %s", hello.engine_id, error)
            self._awaited_weights = None
            raise
        except StepFailedError as error:
            log.error("engine %s failed at its requests and goes on: %s", hello.engine_id, error)
            raise
        finally:
            if self._is_welcome:
                self._is_welcome = False
                self._disconnected_since = time.monotonic()
            self._spans.end_work()
            # the data plane lets other engines continue what this connection carried
            self.run(self.engine.abort)

    @property
    def _is_idle(self) -> bool:
        return self._is_paused or not self.engine.num_requests

    def _apply_frame(self, frame: wire.ToEngine, received: float, version: int | None) -> None:
        """Do the rest of what a frame says, once the engine itself has paused, aborted or rested. The frame
        came at `received`, when the engine had `version`."""
        match frame:
            case wire.Welcome(weights, is_paused):
                self._is_welcome = True
                self._is_paused = is_paused
                self._welcome_version = weights.version
                if version is not None:
                    self._send_frame(wire.Updated(version))
                self._take_weights(weights)
            case wire.Submit():
                self._spans.aborted_at = None
                for request in frame.whole_requests():
                    self._submit(request)
            case wire.Abort(request_ids=None):
                self._spans.aborted_at = received
            case wire.Update(weights):
                self._take_weights(weights)
            case wire.Pause(is_paused):
                self._is_paused = is_paused
                if is_paused:
                    self._send_frame(wire.EnginePaused())
            case wire.Yield() if self._is_welcome:
                self._spans.end_lease(received, version)
                self._send_frame(wire.Yielded())

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:
            # the data plane then refuses this request; others may be served
            log.error("this engine cannot serve a request: %s", error)
            assert self.version is not None
            self._send_chunks([Chunk.failed(request.request_id, self.version, describe_error(error))])

    def _take_weights(self, weights: WeightsRef) -> None:
        if self.version != weights.version and self._awaited_weights != weights:
            self._awaited_weights = weights
            self._spans.loading_since = time.time() if self.version is None else None
            self.engine.update_weights(weights)

    def _send_frame(self, frame: wire.Frame) -> None:
        self.send(wire.pack(frame))

    def _send_chunks(self, chunks: list[Chunk]) -> None:
        if chunks:
            self._send_frame(wire.Chunks(chunks))

    def _send_updated(self, before: int | None, started: float, held: WeightsRef | None) -> None:
        """Report that the engine, which had version `before`, has new weights since work that began at
        `started`: the awaited ones, unless `held` names others."""
        assert self.version is not None
        self._spans.end_load(before, self.version, started)
        if held is None or held == self._awaited_weights:
            self._awaited_weights = None
        self._send_frame(wire.Updated(self.version))
        if before is None:
            self._on_ready()
        else:
            self._spans.recorder.flush()

    def _send_refused(self, error: WeightsRefusedError) -> None:
        """Raises the error if the data plane has no use for an engine without these weights."""
        assert self._awaited_weights is not None and self.version is not None
        if self.version < self._welcome_version:
            raise error
        log.error("this engine refuses the weights of version %d: %s", self._awaited_weights.version, error)
        self._send_frame(wire.Refused(self._awaited_weights.version, str(error)))
        self._awaited_weights = None
        self._spans.loading_since = None


def describe_error(error: Exception) -> str:
    """An error in a few words; the kind is named unless the message is meant to be read alone."""
    return (
        str(error) if isinstance(error, (ValueError, ConnectionError)) else f"{type(error).__name__}: {error}"
    )


def count_tokens(chunks: list[Chunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)
