"""Serves an application from a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from sf_core.config.addresses import LOOPBACK, listen_at
from sf_core.dataplane.http_protocol import server_config

END_S = 10.0
"""Longest wait for a thread at its end; after that it ends with the process."""


@contextmanager
def serve_app(app: ASGIApp, host: str = LOOPBACK, port: int = 0) -> Iterator[str]:
    """Serve an application from a thread; yields its URL. Raises OSError if the address cannot be
    bound."""
    with listen_at(host, port) as socket_there:
        server = uvicorn.Server(server_config(app))
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [socket_there]}, name="plane", daemon=True
        )
        thread.start()
        reached = f"[{host}]" if ":" in host else host
        try:
            yield f"http://{reached}:{socket_there.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(END_S)
