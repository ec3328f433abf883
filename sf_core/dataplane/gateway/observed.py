"""Observes every request of an agent: metrics, one trace span per turn, and its stream kept alive.

Owns the record of an exchange, for every dialect alike. Routes know nothing of it: it wraps the application,
and learns the turns of a request from the router (`submitted_by_request`).
"""

from __future__ import annotations

import secrets
import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sf_core.dataplane.gateway.dialects.registry import find_dialect
from sf_core.dataplane.gateway.endpoint import ID_HEADERS
from sf_core.dataplane.gateway.keepalive import KeepAliveExchange
from sf_core.dataplane.gateway.metrics import Metrics
from sf_core.dataplane.routing.generation import Generation, submitted_by_request

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
