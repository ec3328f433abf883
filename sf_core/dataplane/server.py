"""The data plane as a process: address, key, port file, graceful shutdown."""

from __future__ import annotations

import socket

import uvicorn

from sf_core.config.addresses import is_loopback, listen_at
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.http_protocol import server_config, tune_interpreter
from sf_core.dataplane.options import DataplaneOptions
from storage import files


def serve(
    host: str,
    port: int,
    options: DataplaneOptions,
    *,
    key: str,
    welcomes_strangers: bool,
    port_file: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 means any free one; `port_file` is written once connections are
    accepted.

    `key` and `welcomes_strangers` are as in `make_app`. Raises ValueError for an address at which others
    would be welcome without a key, for a journal directory that another data plane uses, and for more
    connections than open files; OSError for a port that is taken."""
    if welcomes_strangers and not is_loopback(host):
        raise ValueError(f"other machines can reach {host}: set SF_DATAPLANE_KEY, or serve on 127.0.0.1")
    app = make_app(key, options, welcomes_strangers=welcomes_strangers)
    server = uvicorn.Server(server_config(app, options))
    listening = listen_at(host, port)
    app.state.plane.owner.dataplane = url_of(host, listening)
    if port_file is not None:
        files.write_atomic(files.follow(port_file), str(listening.getsockname()[1]).encode())
    tune_interpreter()
    server.run(sockets=[listening])


def url_of(host: str, listening: socket.socket) -> str:
    """URL of a server at this address, for people."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}"
