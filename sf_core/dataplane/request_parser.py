"""The parser of HTTP requests that the data plane and the forwarder of a sandbox share: both must agree where
each request ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import httptools

_FRAMING = (b"connection", b"content-length", b"transfer-encoding")
"""Headers that say where a request ends."""


class Requests(Protocol):
    """Is told of each part of each request, in this order; a URL and a body may come in pieces."""

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

    def __init__(self, requests: Requests, upgrades: Callable[[], bool] = lambda: False) -> None:
        self._requests = requests
        self._upgrades = upgrades
        self._framing: list[bytes] = []
        self._ignores = False
        """Whether the current request asks for an upgrade that is ignored."""
        self._repeats = False
        """Whether the parser reads a head again, of which was told before."""
        self.on_body = requests.on_body
        self._begin()

    def _begin(self) -> None:
        """Forget what was read."""
        super().__init__(self)
        # as uvicorn has it: the request before the last data may have asked to close
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def close(self) -> None:
        """Let go of itself and of `requests`, whose memory would otherwise be freed much later."""
        super().__init__(None)

    def feed_data(self, data: bytes | memoryview) -> None:  # type: ignore[override]
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._ignores:
                    raise
                rest = rest[upgrade.args[0] :]
                self._read_again()
            else:
                return

    def _read_again(self) -> None:
        """Let the body of the current request follow, of which only the head was read."""
        line = b"%s / HTTP/%s\r\n" % (self.get_method(), self.get_http_version().encode())
        self._begin()
        self._repeats = True
        super().feed_data(b"".join([line, *self._framing, b"\r\n"]))

    def on_message_begin(self) -> None:
        if not self._repeats:
            self._framing.clear()
            self._requests.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._repeats:
            self._requests.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._repeats:
            if name.lower() in _FRAMING:
                self._framing.append(b"%s: %s\r\n" % (name, value))
            self._requests.on_header(name, value)

    def on_headers_complete(self) -> None:
        """An error is raised again by the parser, as one of its own."""
        if self.get_method() == b"CONNECT":
            raise PermissionError("no proxy")
        self._ignores = self.should_upgrade() and not self._upgrades()
        if not self._ignores:
            self._repeats = False
            self._requests.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._ignores:
            self._requests.on_message_complete()
