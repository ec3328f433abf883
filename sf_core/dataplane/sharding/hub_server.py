"""The hub as a process: the port, its application, and a private folder for the sockets between processes."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.serving import server_config, tune_interpreter
from sf_core.dataplane.sharding.forwarding import socket_path
from sf_core.dataplane.sharding.hub import Gateways
from sf_core.dataplane.sharding.owners import PathOwner
from sf_core.dataplane.sharding.port import AdoptingServer, Port

MAX_FOLDER_CHARS = 80
"""Longest path of the folder of sockets: Linux has room for 107 bytes in the path of a socket."""


def serve_with_gateways(
    listen: Callable[[], socket.socket], key: str | None, options: DataplaneOptions
) -> None:
    """See `serve`; `listen` is called once it is known that no other data plane uses the journal directory.
    Raises ValueError too if the folder for temporary files has too long a path."""
    # readable by nobody else: over the sockets in it one process trusts the other
    with tempfile.TemporaryDirectory(prefix="sf-gateways-", ignore_cleanup_errors=True) as folder:
        if len(folder) > MAX_FOLDER_CHARS:
            raise ValueError(f"the path {folder} is too long for sockets: set TMPDIR to a shorter one")
        gateways = Gateways(Path(folder), key, options)
        app = make_app(key, options, gateways)
        config = server_config(app, socket_path(gateways.folder, PathOwner.HUB))
        server = AdoptingServer(config, Port(listen(), gateways.pass_on))
        tune_interpreter()
        server.run()
