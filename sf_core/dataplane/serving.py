"""How every process of a data plane speaks HTTP and WebSocket, and how its interpreter is set for that."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from sf_core.engines.client import HEARTBEAT_S

SWITCH_S = 0.0005
"""How long the event loop keeps the interpreter while another thread waits for it."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Allocations between collections of the young, and collections between those of the old generations."""


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


def tune_interpreter() -> None:
    """For a busy event loop beside a thread that needs the interpreter for microseconds, and for millions of
    objects that live as long as their sessions (docs/decisions/006)."""
    sys.setswitchinterval(SWITCH_S)
    # what is imported stays; looking through it and all sessions again and again cost a third of the time
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
