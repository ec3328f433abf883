"""The engine's end of its connection to the data plane: what a rollout lease runs.

Owns the loop that alternates frames and engine steps. Makes no decision: the data plane routes, pauses and
revokes; the engine samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential
from websockets.exceptions import ConnectionClosed, InvalidMessage
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from sf_core.engines import wire
from sf_core.engines.protocol import Engine
from sf_core.types import Chunk, FinishReason, WeightsRef

log = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
"""Both ends send a ping this often and give up on the other when no pong comes for as long again. Pongs are
sent by a thread of their own, so that a long step or the loading of weights does not look like silence."""

BUSY_GAP_S = 0.05
"""Steps closer together than this are recorded as one span of work."""

MAX_SPAN_S = 5.0
"""A span of work is recorded after so long, even if the work goes on."""

MakeEngine = Callable[[WeightsRef], Engine]


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
        """Called when the engine has just loaded new weights, a good moment to write."""


def serve_engine(
    url: str,
    key: str | None,
    hello: dict[str, Any],
    make_engine: MakeEngine,
    recorder: Recorder | None = None,
    *,
    patience_s: float = 60.0,
) -> str:
    """Serve one lease until told to yield; returns the reason that was given.

    The engine is made once the data plane has said which weights it wants, and is closed before the lease is
    given back. The recorder gets every span of sampling, loading, yielding and waiting. A connection
    that breaks is made again; raises ConnectionError once `patience_s` have passed since it broke, and
    ValueError if the data plane ended it because of what the engine sent. What the engine raises ends the
    lease.
    """
    client = _EngineClient(url, key, hello, make_engine, recorder or _Nobody())

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
        client.close()


class _EngineClient:
    def __init__(
        self,
        url: str,
        key: str | None,
        hello: dict[str, Any],
        make_engine: MakeEngine,
        recorder: Recorder,
    ) -> None:
        self._url = url.replace("http", "ws", 1).rstrip("/") + "/engines"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._hello, self._make_engine = hello, make_engine
        self._recorder, self._steps = recorder, _Steps(recorder)
        self._told_to_stop: float | None = None
        """Unix time at which all requests were aborted, as the data plane does before it takes the device."""
        self._engine: Engine | None = None
        self._paused = False
        self.alone_since = time.monotonic()
        """Monotonic time since which no data plane has welcomed it."""
        self._welcomed = False

    def serve(self) -> str:
        """Serve over one connection. Raises ConnectionError when it breaks."""
        try:
            with self._connect() as socket:
                return self._serve(socket)
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == wire.BAD_FRAME:
                raise ValueError(f"the data plane dropped this engine: it {error.rcvd.reason}") from None
            raise ConnectionError(f"data plane at {self._url}: {error}") from error
        finally:
            if self._welcomed:
                self._welcomed = False
                self.alone_since = time.monotonic()
            self._steps.end()
            if self._engine is not None:
                # the data plane lets other engines continue what this connection carried
                self._engine.abort()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

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
        socket.send(wire.pack("hello", self._hello))
        kind, value = wire.unpack(_bytes(socket.recv()))
        if kind == "yield":
            return str(value)
        self._welcomed = True
        self._paused = value["paused"]
        engine = self._use(WeightsRef(value["version"], value["uri"]))
        socket.send(wire.pack("updated", engine.version))
        while True:
            while (frame := self._next_frame(socket, engine)) is not None:
                kind, value = wire.unpack(frame)
                if kind == "yield":
                    told = self._told_to_stop or time.time()
                    self._steps.end()
                    self._send_chunks(socket, engine.abort())
                    self.close()
                    self._recorder.add("moving", "yield", told, time.time(), version=engine.version)
                    socket.send(wire.pack("yielded"))
                    return str(value)
                self._handle(kind, value, engine, socket)
            started = time.time()
            chunks = engine.step()
            self._steps.add(started, time.time(), engine.version, _num_tokens(chunks))
            self._send_chunks(socket, chunks)

    def _next_frame(self, socket: Connection, engine: Engine) -> bytes | None:
        """The next frame; None if there is none and the engine has something to do meanwhile."""
        idle = self._paused or engine.num_requests == 0
        try:
            frame = _bytes(socket.recv(timeout=BUSY_GAP_S if idle else 0))
        except TimeoutError:
            if not idle:
                return None
            self._steps.end()
            started = time.time() - BUSY_GAP_S
            frame = _bytes(socket.recv())
            self._recorder.add(
                "wait", "the end of a pause" if self._paused else "requests", started, time.time()
            )
        return frame

    def _handle(self, kind: str, value: Any, engine: Engine, socket: Connection) -> None:
        match kind:
            case "submit":
                self._told_to_stop = None
                for request in wire.unpack_requests(value):
                    try:
                        engine.submit(request)
                    except ValueError as error:
                        # the data plane then refuses this request; others may be served
                        log.error("a request cannot be done here: %s", error)
                        ended = Chunk(request.request_id, [], [], engine.version, FinishReason.LENGTH)
                        self._send_chunks(socket, [ended])
            case "abort":
                if value is None:
                    self._told_to_stop = time.time()
                chunks = engine.abort(value)
                self._steps.give_back(_num_tokens(chunks), engine.version)
                self._send_chunks(socket, chunks)
            case "update":
                self._load_weights(engine, WeightsRef(value["version"], value["uri"]))
                socket.send(wire.pack("updated", engine.version))
                self._recorder.flush()
            case "pause":
                self._paused = True
                socket.send(wire.pack("paused"))
            case "resume":
                self._paused = False
            case _:
                raise ValueError(f"the data plane sent {kind!r}, which this engine client does not know")

    def _use(self, weights: WeightsRef) -> Engine:
        if self._engine is None:
            with self._moving("load engine", weights.version):
                self._engine = self._make_engine(weights)
        if self._engine.version != weights.version:
            self._load_weights(self._engine, weights)
        return self._engine

    def _load_weights(self, engine: Engine, weights: WeightsRef) -> None:
        self._steps.end()
        with self._moving("load weights", weights.version):
            engine.load_weights(weights.uri, weights.version)

    @contextmanager
    def _moving(self, label: str, version: int) -> Iterator[None]:
        started = time.time()
        yield
        self._recorder.add("moving", label, started, time.time(), version=version)

    @staticmethod
    def _send_chunks(socket: Connection, chunks: list[Chunk]) -> None:
        if chunks:
            socket.send(wire.pack_chunks(chunks))


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


def _bytes(frame: str | bytes) -> bytes:
    if isinstance(frame, str):
        raise ValueError("the data plane sent a text frame; expected MessagePack")
    return frame
