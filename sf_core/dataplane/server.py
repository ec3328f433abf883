"""The data plane as a process: address, key, port file, graceful shutdown."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import uvicorn

from sf_core.config.addresses import is_loopback
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.journal.journal import Fsync
from sf_core.dataplane.serving import server_config, tune_interpreter
from sf_core.dataplane.sessions.memory import MEMORY_MB
from sf_core.dataplane.turns.host import GRACE_S


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    port_file: str | None = None,
    key: str | None = None,
    journal_dir: str | None = None,
    fsync: Fsync = "turn",
    grace_s: float = GRACE_S,
    memory_mb: float = MEMORY_MB,
    num_gateways: int = 1,
) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 means any free one; `port_file` is written once connections are
    accepted. With more than one gateway process, those serve the turns and this one does everything else.

    Raises ValueError for an address that is not loopback without a key, for `num_gateways` below 1, and for
    a journal directory that another data plane uses."""
    if key is None and not is_loopback(host):
        raise ValueError(f"{host} can be reached by others: set SF_DATAPLANE_KEY, or serve on 127.0.0.1")
    if num_gateways < 1:
        raise ValueError(f"--gateways must be at least 1, got {num_gateways}")

    def listen() -> socket.socket:
        listening = socket.create_server((host, port), backlog=2048, family=_family(host))
        if port_file is not None:
            _write_whole(Path(port_file), str(listening.getsockname()[1]))
        return listening

    if num_gateways > 1:
        # imported here because a single process needs none of it
        from sf_core.dataplane.sharding.hub_server import serve_with_gateways

        return serve_with_gateways(num_gateways, listen, key, journal_dir, fsync, grace_s, memory_mb)
    server = uvicorn.Server(server_config(make_app(key, journal_dir, fsync, grace_s, memory_mb)))
    listening = listen()
    tune_interpreter()
    server.run(sockets=[listening])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
