"""The engine's end of its connection to the data plane: what a rollout lease runs.

Owns the loop that alternates frames and engine steps. Makes no decision: the data plane routes, pauses and
revokes; the engine samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential
from websockets.exceptions import ConnectionClosed, InvalidMessage
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from sf_core.engines import wire
from sf_core.engines.protocol import Engine, EngineLostError, WeightsRefusedError
from sf_core.types import Chunk, FinishReason, WeightsRef

log = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
"""Both ends send a ping this often and give up on the other when no pong comes for as long again. Pongs are
sent by a thread of their own, so that a long step or the loading of weights does not look like silence."""

BUSY_GAP_S = 0.05
"""Steps closer together than this are recorded as one span of work."""

MAX_SPAN_S = 5.0
"""A span of work is recorded after so long, even if the work goes on."""

LOOK_AGAIN_S = 0.005
"""How often an engine with nothing to sample is asked whether its weights are there."""


class Recorder(Protocol):
    """Records what the engine did; sf_core.scheduling.timeline has one."""

    def add(
        self,
        kind: Literal["busy", "moving", "wait"],
        label: str,
        start: float,
        end: float,
        *,
        version: int | None = None,
        tokens: int = 0,
    ) -> None:
        """Times in Unix seconds."""

    def flush(self) -> None:
        """Called when the engine has just taken new weights, a good moment to write."""


class Socket(Protocol):
    def send(self, message: bytes) -> None: ...


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
    since the connection broke, and ValueError if the data plane ended it because of what the engine sent.
    What else the engine raises ends the lease.
    """
    client = EngineClient(url, key, hello, engine, recorder, on_ready)

    def out_of_patience(_: RetryCallState) -> bool:
        return time.monotonic() - client.alone_since > patience_s

    retrying = Retrying(
        # an engine that cannot read its weights raises OSError too: that must end the lease
        retry=retry_if_exception_type(ConnectionError),
        wait=wait_random_exponential(multiplier=0.05, max=2.0),
        stop=out_of_patience,
        reraise=True,
    )
    try:
        return retrying(client.serve)
    finally:
        engine.rest()


class EngineClient:
    """One engine under one lease: what it does with each frame, and between them."""

    def __init__(
        self,
        url: str,
        key: str | None,
        hello: wire.Hello,
        engine: Engine,
        recorder: Recorder | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        recorder = recorder or _Nobody()
        self._url = url.replace("http", "ws", 1).rstrip("/") + "/engines"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._hello, self._engine, self._on_ready = hello, engine, on_ready
        self._recorder, self._steps = recorder, _Steps(recorder)
        self._told_to_stop: float | None = None
        """Unix time at which all requests were aborted, as the data plane does before it takes the device."""
        self._awaited: WeightsRef | None = None
        """Weights that the engine fetches."""
        self._loads_since: float | None = None
        """Unix time since which the engine has nothing to do but to fetch them."""
        self._welcome_version = 0
        """Version without which the data plane gives it no requests over this connection."""
        self._paused = False
        self.alone_since = time.monotonic()
        """Monotonic time since which no data plane has welcomed it."""
        self._welcomed = False

    def serve(self) -> str:
        """Serve over one connection. Raises ConnectionError when it breaks, or the engine is lost."""
        try:
            with self._connect() as socket:
                return self._serve(socket)
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == wire.BAD_FRAME:
                raise ValueError(f"the data plane dropped this engine: it {error.rcvd.reason}") from None
            raise ConnectionError(f"data plane at {self._url}: {error}") from error
        except EngineLostError as error:
            log.warning("engine %s is lost and starts anew: %s", self._hello.engine_id, error)
            self._awaited = None
            raise
        finally:
            if self._welcomed:
                self._welcomed = False
                self.alone_since = time.monotonic()
            self._steps.end()
            # the data plane lets other engines continue what this connection carried
            self._engine.abort()

    def _connect(self) -> Connection:
        try:
            return connect(
                self._url,
                additional_headers=self._headers,
                proxy=None,
                compression=None,
                max_size=None,
                # read on while the engine works, or pings would wait behind frames; what is in flight at an
                # engine is bounded, so what can queue up here is too
                max_queue=None,
                ping_interval=HEARTBEAT_S,
                ping_timeout=HEARTBEAT_S,
                open_timeout=HEARTBEAT_S,
                close_timeout=1.0,
            )
        except (OSError, InvalidMessage) as error:
            raise ConnectionError(f"data plane at {self._url}: {error}") from error

    def _serve(self, socket: Connection) -> str:
        socket.send(wire.pack(self._hello))
        greeting = _read(socket.recv())
        if isinstance(greeting, wire.Yield):
            return greeting.reason
        assert isinstance(greeting, wire.Welcome)
        self._welcomed = True
        self.handle(greeting, socket)
        while True:
            while (frame := self._next_frame(socket)) is not None:
                self.handle(frame, socket)
                if isinstance(frame, wire.Yield):
                    return frame.reason
            self.step(socket)

    def _next_frame(self, socket: Connection) -> wire.ToEngine | None:
        """The next frame; None if there is none and the engine has something to do meanwhile."""
        loads, idle = self._awaited is not None, self._is_idle
        if loads:
            self._note_loading(idle)
        try:
            frame = _read(socket.recv(timeout=(LOOK_AGAIN_S if loads else BUSY_GAP_S) if idle else 0))
        except TimeoutError:
            if loads or not idle:
                return None
            self._steps.end()
            started = time.time() - BUSY_GAP_S
            frame = _read(socket.recv())
            self._recorder.add(
                "wait", "the end of a pause" if self._paused else "requests", started, time.time()
            )
        return frame

    @property
    def _is_idle(self) -> bool:
        return self._paused or self._engine.num_requests == 0

    @property
    def has_work(self) -> bool:
        """Whether it is to step: it samples, or fetches weights."""
        return self._awaited is not None or not self._is_idle

    def handle(self, frame: wire.ToEngine, socket: Socket) -> None:
        """Do what the data plane says; on `yield`, the engine rests afterwards."""
        engine = self._engine
        match frame:
            case wire.Welcome(weights, paused):
                self._welcome_version = weights.version
                self._pause(paused)
                if engine.version is not None:
                    socket.send(wire.pack(wire.Updated(engine.version)))
                self._take_weights(weights)
            case wire.Submit():
                self._told_to_stop = None
                for request in frame.whole_requests():
                    try:
                        engine.submit(request)
                    except ValueError as error:
                        # the data plane then refuses this request; others may be served
                        log.error("a request cannot be done here: %s", error)
                        assert engine.version is not None
                        ended = Chunk(request.request_id, [], [], engine.version, FinishReason.LENGTH)
                        self._send_chunks(socket, [ended])
            case wire.Abort(request_ids):
                if request_ids is None:
                    self._told_to_stop = time.time()
                self._send_aborted(socket, request_ids)
            case wire.Update(weights):
                self._take_weights(weights)
            case wire.Pause(paused):
                self._pause(paused)
                if paused:
                    socket.send(wire.pack(wire.Paused()))
            case wire.Yield():
                self._yield(socket)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        if paused:
            self._engine.pause()
        else:
            self._engine.resume()

    def step(self, socket: Socket) -> None:
        """Let the engine step, and report what it sampled or that it holds new weights."""
        engine, before, idle, started = self._engine, self._engine.version, self._is_idle, time.time()
        try:
            chunks = engine.step()
        except WeightsRefusedError as error:
            return self._tell_refused(socket, error)
        if engine.version == before:
            if before is not None and not idle:
                self._steps.add(started, time.time(), before, _num_tokens(chunks))
            return self._send_chunks(socket, chunks)
        if before is not None:
            self._steps.give_back(_num_tokens(chunks), before)
        # what the former weights sampled, before the new version
        self._send_chunks(socket, chunks)
        self._note_loaded(before, started)
        assert engine.version is not None
        socket.send(wire.pack(wire.Updated(engine.version)))
        if before is None:
            self._on_ready()
        else:
            self._recorder.flush()

    def _take_weights(self, weights: WeightsRef) -> None:
        if self._engine.version != weights.version and self._awaited != weights:
            self._awaited = weights
            self._loads_since = time.time() if self._engine.version is None else None
            self._engine.take_weights(weights)

    def _tell_refused(self, socket: Socket, error: WeightsRefusedError) -> None:
        assert self._awaited is not None and self._engine.version is not None
        if self._engine.version < self._welcome_version:
            raise error
        log.error("weights of version %d are refused: %s", self._awaited.version, error)
        socket.send(wire.pack(wire.Refused(self._awaited.version, str(error))))
        self._awaited = self._loads_since = None

    def _note_loading(self, idle: bool) -> None:
        """Loading beside sampling is no time of its own."""
        if not idle:
            self._loads_since = None
        elif self._loads_since is None:
            self._steps.end()
            self._loads_since = time.time()

    def _note_loaded(self, before: int | None, started: float) -> None:
        self._steps.end()
        label = "load engine" if before is None else "load weights"
        since, self._loads_since, self._awaited = self._loads_since or started, None, None
        self._recorder.add("moving", label, since, time.time(), version=self._engine.version)

    def _yield(self, socket: Socket) -> None:
        told, version = self._told_to_stop or time.time(), self._engine.version
        if self._loads_since is not None:
            label = "load engine" if version is None else "load weights"
            self._recorder.add("moving", label, self._loads_since, told)
        self._steps.end()
        self._send_chunks(socket, self._engine.abort())
        self._engine.rest()
        self._recorder.add("moving", "yield", told, time.time(), version=version)
        socket.send(wire.pack(wire.Yielded()))

    def _send_aborted(self, socket: Socket, request_ids: list[str] | None) -> None:
        chunks = self._engine.abort(request_ids)
        if self._engine.version is not None:
            self._steps.give_back(_num_tokens(chunks), self._engine.version)
        self._send_chunks(socket, chunks)

    @staticmethod
    def _send_chunks(socket: Socket, chunks: list[Chunk]) -> None:
        if chunks:
            socket.send(wire.pack(wire.Chunks(chunks)))


class _Steps:
    """Merges steps into spans of work. The first span ends with the first token."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._span: tuple[float, float] | None = None
        self._version = self._tokens = 0
        self._has_sampled = False

    def add(self, start: float, end: float, version: int, tokens: int) -> None:
        if self._span is None or not self._goes_on(start, version):
            self.end()
            self._span, self._version = (start, end), version
        self._span = (self._span[0], end)
        self._tokens += tokens
        if tokens and not self._has_sampled:
            self._has_sampled = True
            self.end()

    def give_back(self, tokens: int, version: int) -> None:
        """Add tokens of earlier steps that no step reported, because their requests were aborted before."""
        if tokens:
            now = time.time()
            self.add(now, now, version, tokens)

    def end(self) -> None:
        if self._span is not None:
            self._recorder.add("busy", "sample", *self._span, version=self._version, tokens=self._tokens)
        self._span, self._tokens = None, 0

    def _goes_on(self, start: float, version: int) -> bool:
        assert self._span is not None
        is_close, is_short = start - self._span[1] < BUSY_GAP_S, start - self._span[0] < MAX_SPAN_S
        return is_close and is_short and version == self._version


def _num_tokens(chunks: list[Chunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


class _Nobody:
    def add(self, *span: object, **facts: object) -> None: ...

    def flush(self) -> None: ...


def _read(frame: str | bytes) -> wire.ToEngine:
    if isinstance(frame, str):
        raise ValueError("the data plane sent a text frame; expected MessagePack")
    return wire.read_from_data_plane(frame)
