"""A proxy like that of a company network, which cannot reach this machine's own services."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
EXCEPTIONS = ("NO_PROXY", "no_proxy")


@dataclass
class SilentProxy:
    """Accepts connections and never answers."""

    listening: socket.socket

    @property
    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        return dict.fromkeys(VARIABLES, url) | dict.fromkeys(EXCEPTIONS, "")

    def was_asked(self) -> bool:
        self.listening.setblocking(False)
        try:
            self.listening.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@contextmanager
def silent_proxy() -> Iterator[SilentProxy]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield SilentProxy(listening)
