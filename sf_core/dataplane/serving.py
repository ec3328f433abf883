"""How every process of a data plane speaks HTTP and WebSocket."""

from __future__ import annotations

from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from sf_core.dataplane.engine_client import HEARTBEAT_S


def server_config(app: ASGIApp, unix_socket: Path | None = None) -> uvicorn.Config:
    """With a path, it listens there itself."""
    return uvicorn.Config(
        app,
        uds=None if unix_socket is None else str(unix_socket),
        loop="uvloop",
        http="httptools",
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
        # agents hold connections open while a run is paused; nobody waits for them at the end
        timeout_graceful_shutdown=1,
    )
