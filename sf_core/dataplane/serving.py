"""HTTP, WebSocket and interpreter settings of a data plane's process."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from sf_core.dataplane.connections import ConnectionLimits, most_connections
from sf_core.dataplane.http_protocol import HttpProtocol
from sf_core.dataplane.options import DataplaneOptions
from sf_core.engines.drivers.connection import HEARTBEAT_S

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
