"""What connections of a program in a sandbox cost its worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

import certifi
import pytest

from sf_core.agents.sandbox.forward import MAX_CONNECTIONS, MAX_HEAD, forward
from sf_core.types import Endpoint
from tests.bench.waits import patience

CONNECTIONS = 20


async def test_a_connection_does_not_read_all_certificate_authorities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    begun = time.process_time()
    for _ in range(CONNECTIONS):
        ssl.create_default_context()
    contexts_s = time.process_time() - begun

    async def hang_up(_: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        outgoing.close()

    async with asyncio.timeout(patience()):
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

    assert spent_s < contexts_s / 2


async def test_headers_after_a_body_that_do_not_end_are_not_kept() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(2**16):
            pass
        writer.close()

    async with asyncio.timeout(patience()):
        plane = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{plane.sockets[0].getsockname()[1]}/sessions/s/v1"
        listener = socket.create_server(("127.0.0.1", 0))
        async with plane, forward(Endpoint(url, "key", "policy"), listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            head = b"POST /sessions/s/v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
            # a body may be as long as it likes
            writer.write(head + b"1000\r\n%b\r\n" % bytes(2**12) * 100 + b"0\r\nx: ")
            writer.write(b"y" * MAX_HEAD)
            assert await reader.readline() == b"HTTP/1.1 403 Forbidden\r\n"


async def test_a_connection_that_the_data_plane_has_ended_takes_no_place() -> None:
    async def give_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        writer.close()

    async with asyncio.timeout(patience()):
        plane = await asyncio.start_server(give_up, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{plane.sockets[0].getsockname()[1]}/sessions/s/v1"
        listener = socket.create_server(("127.0.0.1", 0))
        writers = []
        async with plane, forward(Endpoint(url, "key", "policy"), listener):
            for _ in range(MAX_CONNECTIONS + 1):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                # the program never ends it
                writers.append(writer)
                writer.write(b"GET /sessions/s/v1/models HTTP/1.1\r\n")
                assert await reader.read() == b"HTTP/1.1 408 Request Timeout\r\n\r\n"
            for writer in writers:
                writer.close()
