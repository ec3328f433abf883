"""The data plane as a process: address, key, port file, graceful end."""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path

import uvicorn

from sf_core.addresses import is_loopback
from sf_core.dataplane.app import make_app
from sf_core.dataplane.engine_client import HEARTBEAT_S
from sf_core.dataplane.journal import Fsync
from sf_core.dataplane.memory import MEMORY_MB
from sf_core.dataplane.run import GRACE_S

SWITCH_S = 0.0005
"""How long the event loop keeps the interpreter while another thread waits for it."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Allocations between collections of the young, and collections between those of the old generations."""


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    port_file: str | None = None,
    key: str | None = None,
    journal_dir: str | None = None,
    fsync: Fsync = "turn",
    grace_s: float = GRACE_S,
    memory_mb: float = MEMORY_MB,
) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 means any free one; `port_file` is written once connections are
    accepted. Raises ValueError for an address that others can reach without a key, and for a journal
    directory that another data plane works in."""
    if key is None and not is_loopback(host):
        raise ValueError(f"{host} can be reached by others: set SF_DATAPLANE_KEY, or serve on 127.0.0.1")
    app = make_app(key, journal_dir, fsync, grace_s, memory_mb)
    listening = socket.create_server((host, port), backlog=2048, family=_family(host))
    if port_file is not None:
        _write_whole(Path(port_file), str(listening.getsockname()[1]))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
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
    )
    _tune_interpreter()
    server.run(sockets=[listening])


def _tune_interpreter() -> None:
    """For a busy event loop beside a thread that needs the interpreter for microseconds, and for millions of
    objects that live as long as their sessions (docs/decisions/006)."""
    sys.setswitchinterval(SWITCH_S)
    # what is imported stays; looking through it and all sessions again and again cost a third of the time
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
