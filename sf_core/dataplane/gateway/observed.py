"""Observes every request of an agent, for every dialect alike: metrics, one trace span per turn, and its
stream kept alive.

Routes know nothing of it: it wraps the application, and learns the turns of a request from the router
(`submitted_by_request`). control/metrics.py has the metrics that are collected on demand.

An event stream stays open while nothing is sampled, and ends if no client reads it. Of events this module
knows only that empty lines may come between them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sf_core.dataplane.gateway.dialects.registry import find_dialect
from sf_core.dataplane.gateway.endpoint import ID_HEADERS
from sf_core.dataplane.routing.generation import Generation, submitted_by_request

_OVERHEAD_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)

_ENGINE_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self, counted_elsewhere: Collector) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "sf_requests",
            "Requests of agents, by status of the response.",
            ["dialect", "status"],
            registry=registry,
        )
        self.agent_bytes = Counter(
            "sf_agent_bytes",
            "Bytes of request and response bodies of agents.",
            ["direction"],
            registry=registry,
        )
        self.overhead = Histogram(
            "sf_gateway_overhead_seconds",
            "Time of a request outside the router: reading, rendering and answering.",
            buckets=_OVERHEAD_BUCKETS_S,
            registry=registry,
        )
        self.waiting = Histogram(
            "sf_wait_seconds",
            "Time until the first engine received a turn.",
            buckets=_ENGINE_BUCKETS_S,
            registry=registry,
        )
        self.engine = Histogram(
            "sf_engine_seconds",
            "Time from the first engine that received a turn to its end, interruptions included.",
            buckets=_ENGINE_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "sf_prompt_tokens",
            "Prompt tokens, reused from the record or newly encoded.",
            ["origin"],
            registry=registry,
        )
        registry.register(counted_elsewhere)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)


KEEP_ALIVE_S = 10.0
"""Seconds of silence after which a stream is sent an empty line: proxies and clients close silent streams."""

SLOW_READER_S = 60.0
"""Seconds after which a client that reads nothing of its answer is given up. Its tokens wait in memory until
then."""

# empty, not a comment as usual in event streams: for google-genai any other line begins an answer
_EMPTY_LINE: Message = {"type": "http.response.body", "body": b"\n", "more_body": True}


class KeepAliveExchange:
    """`send` and `receive` of one exchange. Must be closed when the exchange is over, however it ended."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._timer: asyncio.TimerHandle | None = None
        self._line: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[Any] | None = None
        self._last_sent = 0.0
        self._is_sending = False
        self._gave_up = False

    async def send(self, message: Message) -> None:
        """Send a message; it is dropped if the client was given up, as if the client had gone away."""
        if self._gave_up:
            return
        self._is_sending = True
        try:
            async with asyncio.timeout(SLOW_READER_S):
                if self._line is not None:
                    # otherwise the empty line could be sent after the end of the stream
                    await self._line
                await self._send(message)
        except TimeoutError:
            return self._give_up()
        finally:
            self._is_sending = False
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        if message["type"] == "http.response.start":
            if _is_event_stream(message):
                self._timer = loop.call_later(KEEP_ALIVE_S, self._tick)
        elif not message.get("more_body"):
            self.close()

    async def receive(self) -> Message:
        if self._gave_up:
            return {"type": "http.disconnect"}
        self._receiver = asyncio.current_task()
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if not self._gave_up or self._receiver is None:
                raise
            self._receiver.uncancel()
            return {"type": "http.disconnect"}
        finally:
            self._receiver = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line is not None:
            self._line.cancel()
            self._line = None

    def _give_up(self) -> None:
        """Make the client appear gone to the application."""
        self._gave_up = True
        self.close()
        if self._receiver is not None:
            self._receiver.cancel()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_sent >= KEEP_ALIVE_S:
            self._last_sent = loop.time()
            if not self._is_sending and (self._line is None or self._line.done()):
                self._line = asyncio.ensure_future(self._send(_EMPTY_LINE))
        self._timer = loop.call_at(self._last_sent + KEEP_ALIVE_S, self._tick)


def _is_event_stream(message: Message) -> bool:
    kind: bytes = dict(message.get("headers", ())).get(b"content-type", b"")
    return kind.startswith(b"text/event-stream")


CLIENT_GONE = 499
"""Status that is counted for a client that went away before its answer began."""

_tracer = trace.get_tracer("seamlessflow")
_propagator = TraceContextTextMapPropagator()


class ObservationMiddleware:
    """Middleware that wraps every request of an agent."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _give_id(scope, send)
        dialect = find_dialect(scope["path"]) if scope["type"] == "http" else None
        if dialect is None:
            return await self._app(scope, receive, send)
        exchange = _Exchange(receive, send)
        token = submitted_by_request.set(exchange.turns)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            submitted_by_request.reset(token)
            exchange.close()
            self._record(dialect.name, scope, exchange)

    def _record(self, dialect: str, scope: Scope, exchange: _Exchange) -> None:
        metrics = self._metrics
        headers = dict(scope["headers"])
        metrics.requests.labels(dialect, exchange.status).inc()
        metrics.agent_bytes.labels("to_agents").inc(exchange.num_bytes)
        metrics.agent_bytes.labels("from_agents").inc(int(headers.get(b"content-length", 0)))
        turns = [turn for turn in exchange.turns if turn.is_over]
        if not turns:
            return
        # turns of one request run concurrently
        router_s = max(turn.over_at for turn in turns) - min(turn.submitted_at for turn in turns)
        metrics.overhead.observe(time.monotonic() - exchange.began_at - router_s)
        context = _trace_context(headers)
        for turn in turns:
            if turn.started_at:
                metrics.waiting.observe(turn.started_at - turn.submitted_at)
                metrics.engine.observe(turn.over_at - turn.started_at)
            metrics.prompt_tokens.labels("reused").inc(turn.num_reused)
            metrics.prompt_tokens.labels("encoded").inc(len(turn.request.prompt_ids) - turn.num_reused)
            _record_span(dialect, turn, context)


class _Exchange:
    def __init__(self, receive: Receive, send: Send) -> None:
        self.turns: list[Generation] = []
        self.status = CLIENT_GONE
        self.num_bytes = 0
        self.began_at = time.monotonic()
        self._connection = KeepAliveExchange(receive, send)
        self.receive = self._connection.receive
        self.close = self._connection.close

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._connection.send(message)


def _give_id(scope: Scope, send: Send) -> Send:
    """Give the request an id, and return a `send` that adds the id to the response."""
    scope["request_id"] = f"req_{secrets.token_hex(12)}"
    request_id = scope["request_id"].encode()

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *((header, request_id) for header in ID_HEADERS)]
        await send(message)

    return send_with_id


def _trace_context(headers: dict[bytes, bytes]) -> Context:
    """The agent's trace context, so that its trace shows the turns it caused."""
    names = b"traceparent", b"tracestate"
    carrier = {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}
    return _propagator.extract(carrier, Context()) if carrier else Context()


def _record_span(dialect: str, turn: Generation, context: Context) -> None:
    """Record a turn's span; costs next to nothing without a configured OpenTelemetry SDK."""
    unix_minus_monotonic = time.time() - time.monotonic()
    span = _tracer.start_span(
        "turn",
        context,
        SpanKind.SERVER,
        {
            "sf.dialect": dialect,
            "sf.session": turn.session_id,
            "sf.engines": turn.engines,
            "sf.interruptions": turn.interruptions,
            "sf.policy_version": turn.versions[-1] if turn.versions else -1,
            "sf.wait_s": (turn.started_at or turn.over_at) - turn.submitted_at,
            "sf.finish_reason": turn.finish_reason or "none",
            "gen_ai.usage.input_tokens": len(turn.request.prompt_ids),
            "gen_ai.usage.output_tokens": len(turn.token_ids),
        },
        start_time=round((turn.submitted_at + unix_minus_monotonic) * 1e9),
    )
    span.end(round((turn.over_at + unix_minus_monotonic) * 1e9))
