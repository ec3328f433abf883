"""The parser of HTTP requests that the data plane and the forwarder of a sandbox share: both must agree where
each request ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import httptools

_FRAMING = (b"connection", b"content-length", b"transfer-encoding")
"""Headers that say where a request ends."""


class RequestReceiver(Protocol):
    """Receives each part of each request, in this order. A URL and a body may come in pieces."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser(httptools.HttpRequestParser):
    """Parses requests as if they had no header `Upgrade`, which RFC 9110 allows. In httptools such a header
    ends the parsing, so that the request would lose its body.

    A request for which `upgrades` is true ends in HttpParserUpgrade, as in httptools. The method CONNECT ends
    in HttpParserError."""

    def __init__(self, receiver: RequestReceiver, upgrades: Callable[[], bool] = lambda: False) -> None:
        self._receiver = receiver
        self._upgrades = upgrades
        self._framing: list[bytes] = []
        self._ignores_upgrade = False
        """Whether the current request asks for an upgrade that is ignored."""
        self._is_repeated_head = False
        """Whether the parser reads a head again whose parts were passed on before."""
        self.on_body = receiver.on_body
        self._reset()

    def _reset(self) -> None:
        """Start anew, as after a whole request."""
        super().__init__(self)
        # as in uvicorn: data may follow a request that asked to close the connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def close(self) -> None:
        """Drop the references to itself and to the receiver, whose memory would otherwise be freed much
        later."""
        super().__init__(None)

    def feed_data(self, data: bytes | memoryview) -> None:  # type: ignore[override]
        remaining = memoryview(data)
        while True:
            try:
                super().feed_data(remaining)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._ignores_upgrade:
                    raise
                remaining = remaining[upgrade.args[0] :]
                self._parse_head_again()
            else:
                return

    def _parse_head_again(self) -> None:
        """Parse the head of the current request again, without its upgrade, so that its body follows."""
        line = b"%s / HTTP/%s\r\n" % (self.get_method(), self.get_http_version().encode())
        self._reset()
        self._is_repeated_head = True
        super().feed_data(b"".join([line, *self._framing, b"\r\n"]))

    def on_message_begin(self) -> None:
        if not self._is_repeated_head:
            self._framing.clear()
            self._receiver.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated_head:
            self._receiver.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_repeated_head:
            if name.lower() in _FRAMING:
                self._framing.append(b"%s: %s\r\n" % (name, value))
            self._receiver.on_header(name, value)

    def on_headers_complete(self) -> None:
        """The parser raises errors of this method again, as its own."""
        if self.get_method() == b"CONNECT":
            raise PermissionError("no proxy")
        self._ignores_upgrade = self.should_upgrade() and not self._upgrades()
        if not self._ignores_upgrade:
            self._is_repeated_head = False
            self._receiver.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._ignores_upgrade:
            self._receiver.on_message_complete()
