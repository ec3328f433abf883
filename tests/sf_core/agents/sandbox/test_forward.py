"""What a program in a sandbox costs its worker with each connection to a data plane behind TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

import certifi
import pytest

from sf_core.agents.sandbox.forward import forward
from sf_core.types import Endpoint
from tests.patience import patience

CONNECTIONS = 20


def test_a_connection_does_not_read_all_certificate_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    begun = time.process_time()
    for _ in range(CONNECTIONS):
        ssl.create_default_context()
    contexts_s = time.process_time() - begun

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def connect() -> float:
        plane = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{plane.sockets[0].getsockname()[1]}/sessions/s/v1"
        listener = socket.create_server(("127.0.0.1", 0))
        async with plane, forward(Endpoint(url, "key", "policy"), listener) as inside:
            begun = time.process_time()
            for _ in range(CONNECTIONS):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                # the handshake fails
                assert await reader.read() == b""
                writer.close()
            spent_s = time.process_time() - begun
            assert inside.api_key == "key"
        return spent_s

    assert asyncio.run(asyncio.wait_for(connect(), patience())) < contexts_s / 2
