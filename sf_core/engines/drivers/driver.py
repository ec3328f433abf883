"""What both drivers do: they serve a lease over as many connections as necessary, and obey the frames of the
data plane. They decide nothing: the data plane routes, pauses and revokes; the engine samples.

Also their connection (the address of the WebSocket, how it is opened, and the errors of its failures), and
the spans of time in which an engine sampled, loaded weights, yielded or waited.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from tenacity import Retrying, retry_if_exception_type, wait_random_exponential
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from sf_core.engines import wire
from sf_core.engines.protocol import EngineLostError, StepFailedError, WeightsRefusedError
from sf_core.types import Chunk, GenerationRequest, WeightsRef

HEARTBEAT_S = 20.0
"""Both ends send a ping this often and give up on the other when no pong comes for as long again. Pongs do
not wait for steps, so that a long step or the loading of weights does not look like silence."""

RETRYABLE_STATUSES = {408, 429, *range(500, 600)}
"""HTTP statuses of a data plane, or of a proxy before it, after which an engine tries again."""


class DataPlaneAddress:
    """The address of a data plane, and how an engine connects to it."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.replace("http", "ws", 1).rstrip("/") + "/engines"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # no max_queue: frames are read while the engine works, or pings would wait behind them; the requests
        # at an engine are bounded, so the queue is too
        self.options: dict[str, Any] = {
            "additional_headers": headers,
            "proxy": None,
            "compression": None,
            "max_size": None,
            "max_queue": None,
            "open_timeout": HEARTBEAT_S,
            "ping_interval": HEARTBEAT_S,
            "ping_timeout": HEARTBEAT_S,
            "close_timeout": 1.0,
        }
        """Options of websockets' `connect`."""

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Surround the call that connects. Raises ConnectionError if no data plane answers, or if it has no
        room now."""
        try:
            yield
        except InvalidStatus as error:
            if error.response.status_code not in RETRYABLE_STATUSES:
                raise
            body = bytes(error.response.body or b"").decode(errors="replace")[:200]
            raise ConnectionError(f"data plane at {self.url}: {error}: {body}") from error
        except (OSError, InvalidMessage) as error:
            raise ConnectionError(f"data plane at {self.url}: {error}") from error

    def interpret_close(self, error: ConnectionClosed) -> Exception:
        """The error to raise for a connection that has ended: a ConnectionError, after which the engine
        connects again, or a ValueError, because of a frame that the engine sent."""
        if error.rcvd is not None and error.rcvd.code == wire.BAD_FRAME:
            return ValueError(f"the data plane dropped this engine: {error.rcvd.reason}")
        return ConnectionError(f"data plane at {self.url}: {error}")


BUSY_GAP_S = 0.05
"""Work that is closer together than this is recorded as one span."""

MAX_SPAN_S = 5.0
"""A span of work is recorded after so long, even if the work goes on."""


Work = Literal["busy", "moving", "wait"]


class Recorder(Protocol):
    """Records what the engine did; sf_core.scheduling.timeline has one."""

    def add(
        self, kind: Work, label: str, start: float, end: float, *, version: int | None = None, tokens: int = 0
    ) -> None:
        """Times in Unix seconds."""

    def flush(self) -> None:
        """Called when the engine has just taken new weights, a good moment to write."""


class NoRecorder:
    def add(self, *span: object, **facts: object) -> None: ...

    def flush(self) -> None: ...


class Spans:
    """Merges work that follows closely into one span. The first span of work ends with the first token."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.aborted_at: float | None = None
        """Unix time at which all requests were aborted, as the data plane does before it takes the device."""
        self.loading_since: float | None = None
        """Unix time since which the engine has nothing to do but to fetch weights."""
        self._span: tuple[float, float] | None = None
        self._version = 0
        self._tokens = 0
        self._has_sampled = False

    def add_work(self, start: float, end: float, version: int, tokens: int) -> None:
        if self._span is None or not self._continues_span(start, version):
            self.end_work()
            self._span = (start, end)
            self._version = version
        self._span = (self._span[0], end)
        self._tokens += tokens
        if tokens and not self._has_sampled:
            self._has_sampled = True
            self.end_work()

    def add_late_tokens(self, tokens: int, version: int) -> None:
        """Add tokens of earlier work that were reported only when their requests were aborted."""
        if tokens:
            now = time.time()
            self.add_work(now, now, version, tokens)

    def end_work(self) -> None:
        if self._span is not None:
            self.recorder.add("busy", "sample", *self._span, version=self._version, tokens=self._tokens)
        self._span = None
        self._tokens = 0

    def record_load(self, is_idle: bool) -> None:
        """Weights are being fetched. Only an idle engine spends time of its own on that."""
        if not is_idle:
            self.loading_since = None
        elif self.loading_since is None:
            self.end_work()
            self.loading_since = time.time()

    def end_load(self, before: int | None, version: int, started: float) -> None:
        """The engine, which had version `before`, has `version` since work that began at `started`."""
        self.end_work()
        since = self.loading_since or started
        self.loading_since = None
        self.recorder.add("moving", _label_load(before), since, time.time(), version=version)

    def add_wait(self, since: float, is_paused: bool) -> None:
        """The engine has had nothing to do since then."""
        now = time.time()
        if now - since > BUSY_GAP_S:
            self.end_work()
            self.recorder.add("wait", "the end of a pause" if is_paused else "requests", since, now)

    def end_lease(self, asked_at: float, version: int | None) -> None:
        """The engine, which had `version`, has yielded, as it was asked to."""
        asked_at = self.aborted_at or asked_at
        if self.loading_since is not None:
            self.recorder.add("moving", _label_load(version), self.loading_since, asked_at)
        self.end_work()
        self.recorder.add("moving", "yield", asked_at, time.time(), version=version)

    def _continues_span(self, start: float, version: int) -> bool:
        assert self._span is not None
        # a negative duration means that the clock was set back
        is_close = start - self._span[1] < BUSY_GAP_S
        is_short = 0 <= start - self._span[0] < MAX_SPAN_S
        return is_close and is_short and version == self._version


def _label_load(version: int | None) -> str:
    return "load engine" if version is None else "load weights"


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
