"""How the data plane speaks HTTP: as uvicorn does, except for what uvicorn gets wrong."""

from __future__ import annotations

from typing import Any

import httptools
from starlette.routing import WebSocketRoute
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sf_core.dataplane.request_parser import RequestParser


class HttpProtocol(HttpToolsProtocol):
    """A connection. A request that asks for another protocol is answered as if it did not ask, unless it asks
    for a WebSocket where the application has one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self, self._opens_websocket)

    def _opens_websocket(self) -> bool:
        if self.parser.get_method() != b"GET" or not self._should_upgrade():
            return False
        path = httptools.parse_url(self.url).path.decode("ascii")
        routes = getattr(self.config.app, "routes", ())
        return any(isinstance(route, WebSocketRoute) and route.path == path for route in routes)
