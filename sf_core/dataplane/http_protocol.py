"""HTTP as the data plane speaks it: as uvicorn does, except for its faults. Also the settings of HTTP,
WebSockets and the interpreter in a data plane's process.

Limits what a client may send before it has shown a key. The settings of uvicorn do not suffice: they bound
neither the size nor the time of a head with httptools, and `limit_concurrency` refuses every client.

A request needs a head of limited size, in limited time, and a body that does not stall. Once a request has
arrived, its answer may take as long as it takes; WebSockets leave this protocol.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from functools import partial
from typing import Any, NoReturn, cast

import httptools
import orjson
import uvicorn
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sf_core.dataplane.connections import NOTE_CALLER, ConnectionLimits, most_connections
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.request_parser import RequestParser
from sf_core.engines.drivers.driver import HEARTBEAT_S

MAX_HEAD_BYTES = 2**15
"""Most bytes of a request that belong to no body: its line, its headers, and those that follow a body."""

MAX_HEADERS = 128

MAX_PIPELINED = 16
"""Most requests of a connection that wait for the answer to an earlier one."""

LINGER_S = 1.0
"""Seconds in which a client that was refused may read why, although it is still sending."""


class _StopError(Exception):
    """Ends the parsing of a request that is refused."""


class HttpProtocol(HttpToolsProtocol):
    """A connection. A request that asks for another protocol is answered as if it did not ask, unless it asks
    for a WebSocket where the application has one."""

    parser: RequestParser

    def __init__(self, connection_limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = RequestParser(self, self._opens_websocket)
        self._connection_limits = connection_limits
        self._is_known = False
        """Whether a request of this connection has shown a key."""
        self._is_welcome = False
        """Whether the current request is answered although it shows no key."""
        self._is_whole = True
        """Whether no request has arrived only in part."""
        self._in_head = False
        self._num_data_bytes = 0
        """Size of the piece of data that arrived last."""
        self._num_body_bytes = 0
        """Size of the part of it that is a body."""
        self._num_head_bytes = 0
        """Number of bytes of headers since the request began, or since the last piece of its body."""
        self._refusal: ApiError | None = None

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connection_limits.add(self, len(self.connections)):
            self._connection_limits.warn()
            self._refuse(
                ApiError(
                    503,
                    f"The data plane serves {self._connection_limits.most} connections, the most that it may "
                    "have: send the request again later.",
                    code="connections_full",
                    retry_after_s=RETRY_AFTER_S,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection_limits.remove(self)
        self.parser.close()
        super().connection_lost(exc)

    def close_for_newcomer(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def close_after_timeout(self) -> None:
        if self.flow.read_paused:
            # the server itself stopped reading
            self._connection_limits.start_timeout(self)
        elif self._is_whole:
            self.transport.close()
        else:
            seconds = f"{self._connection_limits.request_timeout_s:g} s"
            sentence = (
                f"The headers of a request must arrive within {seconds}, and so must each part of its body."
            )
            self._refuse(ApiError(408, sentence))

    def note_caller(self, shows_key: bool) -> None:
        """Record that the current request may be answered, and whether it shows a key."""
        self._is_known |= shows_key
        self._is_welcome = True
        if self._is_known or self._is_whole:
            self._connection_limits.protect(self)

    # --- what arrives

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._num_data_bytes = len(data)
        self._num_body_bytes = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._connection_limits.remove(self)
            self.handle_websocket_upgrade()
            self.parser.close()
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "The request is not valid HTTP."))
        else:
            if not self._is_whole:
                self._wait_for_rest()

    def on_message_begin(self) -> None:
        # uvicorn does this at any data: a connection without a request would then stay open for ever
        self._unset_keepalive_if_required()
        self._is_whole = self._is_welcome = False
        self._in_head = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._stop_parsing()
        if (
            self._num_head_bytes + self._num_data_bytes > MAX_HEAD_BYTES
            and self._head_bytes() > MAX_HEAD_BYTES
        ):
            self._stop_parsing()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parsing()
        self._in_head = False
        if not self._is_known:
            self.scope["extensions"] = {NOTE_CALLER: {"note": self.note_caller}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_whole = True
        self._connection_limits.stop_timeout(self)
        if self._is_welcome:
            self._connection_limits.protect(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_known and not self.transport.is_closing():
            self._connection_limits.unprotect(self)

    def _wait_for_rest(self) -> None:
        """Limit the rest of a request: its head as a whole, its body from piece to piece."""
        if self._num_body_bytes and not self._in_head:
            self._num_head_bytes = 0
            # the whole rest of a request that was answered early must arrive in time, as a head must
            return self._connection_limits.start_timeout(self, anew=not self.cycle.response_complete)
        self._num_head_bytes += self._num_data_bytes - self._num_body_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            return self._refuse(_too_large())
        self._connection_limits.start_timeout(self)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _stop_parsing(self) -> NoReturn:
        self._refusal = _too_large()
        raise _StopError

    def _opens_websocket(self) -> bool:
        if self.parser.get_method() != b"GET" or not self._should_upgrade():
            return False
        path = httptools.parse_url(self.url).path.decode("ascii")
        routes = getattr(self.config.app, "routes", ())
        return any(isinstance(route, WebSocketRoute) and route.path == path for route in routes)

    # --- what is refused

    def _refuse(self, error: ApiError) -> None:
        """Answer with this error, if it is the turn of the current request, and end the connection."""
        self._refusal = error
        self._connection_limits.stop_timeout(self)
        if self.transport.is_closing():
            return
        if self._in_head or self.cycle is None:
            may_answer = self.cycle is None or self.cycle.response_complete
        else:
            may_answer = not (self.pipeline or self.cycle.response_started)
        if not may_answer:
            return self.transport.close()
        self.transport.write(_response(error))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # if it were closed at once, the client might see only that the connection was reset
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


def _too_large() -> ApiError:
    limits = f"{MAX_HEADERS} headers, and {MAX_HEAD_BYTES} bytes of them with its first line"
    return ApiError(431, f"A request may have at most {limits}.")


def _response(error: ApiError) -> bytes:
    body = orjson.dumps(error.body())
    lines = [b"content-type: application/json", b"connection: close", b"content-length: %d" % len(body)]
    if error.retry_after_s is not None:
        lines.append(b"retry-after: %d" % error.retry_after_s)
    return STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", body])


SWITCH_S = 0.0005
"""Seconds for which the event loop keeps the GIL while another thread waits for it."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Allocations between collections of the young generation, and collections between those of older ones."""


def server_config(app: ASGIApp, options: DataplaneOptions | None = None) -> uvicorn.Config:
    """Raises ValueError if this process may not open files for as many connections as the options say."""
    options = options or DataplaneOptions()
    connections = ConnectionLimits(most_connections(options.max_connections), options.request_timeout_s)
    return uvicorn.Config(
        app,
        loop="uvloop",
        # uvicorn only calls it
        http=cast(type[HttpProtocol], partial(HttpProtocol, connections)),
        ws="websockets-sansio",
        ws_max_size=2**28,
        ws_per_message_deflate=False,
        ws_ping_interval=HEARTBEAT_S,
        ws_ping_timeout=HEARTBEAT_S,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # longer than clients keep idle connections, so that they never send on one that is closing
        timeout_keep_alive=75,
        log_level="warning",
        # agents hold connections open while a run is paused; shutdown must not wait for them
        timeout_graceful_shutdown=1,
    )


def tune_interpreter() -> None:
    """Set the interpreter for a busy event loop beside a thread that needs the GIL for microseconds only, and
    for millions of objects that live as long as their sessions (docs/decisions/006)."""
    sys.setswitchinterval(SWITCH_S)
    # imported objects are never freed; scanning them and all sessions repeatedly cost a third of the time
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
