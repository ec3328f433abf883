"""Carries requests of programs in a sandbox to the data plane: those of their own session, and no others."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import cache
from urllib.parse import SplitResult, urlsplit

import httptools

from sf_core.dataplane.request_parser import RequestParser
from sf_core.types import Endpoint

log = logging.getLogger(__name__)

CHUNK = 2**16

MAX_HEAD = 2**18
"""Most bytes of a request outside its body, because the parser keeps them. The data plane refuses fewer."""

MAX_CONNECTIONS = 32
"""Most connections of a sandbox at once, or it could take all open files of its worker; further ones wait."""

PAUSE_S = 1.0

REFUSED = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def forward(endpoint: Endpoint, listener: socket.socket) -> AsyncIterator[Endpoint]:
    """The endpoint as it is reached where the listener is. Requests go through whose path begins as that of
    the endpoint: rewards and other runs are not for what runs inside."""
    accepting = asyncio.create_task(_accept(listener, urlsplit(endpoint.base_url)))
    try:
        port = listener.getsockname()[1]
        yield replace(endpoint, base_url=f"http://127.0.0.1:{port}{urlsplit(endpoint.base_url).path}")
    finally:
        accepting.cancel()
        (failure,) = await asyncio.gather(accepting, return_exceptions=True)
        listener.close()
        if isinstance(failure, Exception):
            log.error("no further connection of the sandbox was accepted", exc_info=failure)


async def _accept(listener: socket.socket, url: SplitResult) -> None:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    room = asyncio.Semaphore(MAX_CONNECTIONS)

    async def carry(connection: socket.socket) -> None:
        try:
            await _carry(connection, url)
        except Exception:
            # the other connections and those to come need the group
            log.exception("a connection of a sandbox to the data plane has failed")
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        while True:
            await room.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                # this process has too many files open
                room.release()
                await asyncio.sleep(PAUSE_S)
            else:
                group.create_task(carry(connection))


@cache
def _tls() -> ssl.SSLContext:
    """Cached, because each connection would otherwise read all certificate authorities."""
    return ssl.create_default_context()


async def _carry(connection: socket.socket, url: SplitResult) -> None:
    tls = _tls() if url.scheme == "https" else None
    port = url.port or (80 if tls is None else 443)
    reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
    # either side may be gone
    with closing(writer), suppress(OSError):
        above, upward = await asyncio.open_connection(url.hostname, port, ssl=tls, limit=CHUNK)
        try:
            async with asyncio.TaskGroup() as group:
                requests = _Requests(url.path.encode())
                asking = group.create_task(_pump(reader, upward, requests.read))
                await _pump(above, writer)
                # the data plane has given the connection up; a program that does not would keep its place
                asking.cancel()
        except* httptools.HttpParserError:
            writer.write(REFUSED)
        except* OSError:
            pass
        finally:
            upward.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_data: Callable[[bytes], None] | None = None
) -> None:
    while data := await reader.read(CHUNK):
        if on_data is not None:
            on_data(data)
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


class _Requests:
    """The requests of a connection. Who reads them at the other end uses the same parser."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._url = b""
        self._num_kept = 0
        """Bytes received since the request began, or since the last piece of its body. The number may be too
        high, by at most one chunk."""
        self._parser = RequestParser(self)

    def read(self, data: bytes) -> None:
        """Raises HttpParserError for data that must not be forwarded."""
        self._parser.feed_data(data)
        self._num_kept += len(data)
        if self._num_kept > MAX_HEAD:
            raise httptools.HttpParserError("the head of a request is too long")

    def on_message_begin(self) -> None:
        self._url = b""
        self._num_kept = 0

    def on_url(self, url: bytes) -> None:
        self._url = (self._url + url)[: len(self._path)]

    def on_headers_complete(self) -> None:
        """An error is raised again by the parser, as one of its own."""
        if self._url != self._path:
            raise PermissionError

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_body(self, body: bytes) -> None:
        self._num_kept = 0

    def on_message_complete(self) -> None: ...
