"""The one port: the hub accepts connections, and the process that owns the first request serves them.

Owns peeking at that request, and passing connections between processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, cast

import uvicorn

from sf_core.dataplane.sharding.background import Background
from sf_core.dataplane.sharding.owners import END_OF_HEAD

MAX_HEAD_BYTES = 64 * 2**10
FIRST_BYTE_S = 75.0
"""Seconds without a byte after which a new connection is closed, as an idle one is between requests."""
HEAD_S = 10.0
"""Seconds for a request's head after its first byte; then what has come of it must do."""

PAUSE_S = 1.0
"""Seconds in which no connection is accepted after an accept failed, for lack of descriptors say."""

log = logging.getLogger(__name__)

Adopt = Callable[[socket.socket], Coroutine[Any, Any, None]]
"""Serves a connection in this process."""

PassOn = Callable[[socket.socket, bytes], Awaitable[bool]]
"""Hands a connection, given its first bytes, to another process; False if it is to be served here."""


class Source(Protocol):
    """Where a server's connections come from."""

    def open(self, adopt: Adopt) -> None: ...

    def close(self) -> None: ...


class AdoptingServer(uvicorn.Server):
    """Serves connections that were accepted elsewhere, beside those of its own socket."""

    def __init__(self, config: uvicorn.Config, source: Source) -> None:
        super().__init__(config)
        self._source = source

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._source.open(self._adopt)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._source.close()
        await super().shutdown(sockets)

    async def _adopt(self, connection: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
            return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)


class Port(Source):
    def __init__(self, listening: socket.socket, pass_on: PassOn) -> None:
        self._listening, self._pass_on = listening, pass_on
        self._listening.setblocking(False)
        self._placing = Background()

    def open(self, adopt: Adopt) -> None:
        asyncio.get_running_loop().add_reader(self._listening, self._accept, adopt)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        self._placing.cancel()

    def _accept(self, adopt: Adopt) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                connection, _ = self._listening.accept()
                self._placing.start(self._take(connection, adopt))
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            log.error("no connection can be accepted for now: %s", error)
            loop.remove_reader(self._listening)
            loop.call_later(PAUSE_S, self.open, adopt)

    async def _take(self, connection: socket.socket, adopt: Adopt) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = await _peek_head(connection)
            if not head:
                connection.close()
            elif not await self._pass_on(connection, head):
                await adopt(connection)
        except OSError:
            connection.close()  # the client went away


async def _peek_head(connection: socket.socket) -> bytes:
    """What has come of the first request, left unread: its whole head if that comes in time; may be empty."""
    seen = b""
    try:
        async with asyncio.timeout(FIRST_BYTE_S) as limit:
            while len(seen) < MAX_HEAD_BYTES and END_OF_HEAD not in seen:
                # peeked bytes stay in the buffer: wait for more than those
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(seen) + 1)
                await _until_readable(connection)
                came = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
                if len(came) <= len(seen):
                    break  # the client sends no more
                if not seen:
                    limit.reschedule(asyncio.get_running_loop().time() + HEAD_S)
                seen = came
    except TimeoutError:
        pass
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return seen


async def _until_readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)


def give(channel: socket.socket, connection: socket.socket) -> bool:
    """Pass a connection to the process at the other end of the channel; False if that cannot take it."""
    try:
        socket.send_fds(channel, [b"c"], [connection.fileno()])
    except (BlockingIOError, ConnectionError):
        return False
    connection.close()
    return True


class Channel(Source):
    """Receiving end of `give`: serves the connections that arrive."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._adopting = Background()

    def open(self, adopt: Adopt) -> None:
        asyncio.get_running_loop().add_reader(self._channel, self._take, adopt)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self._adopting.cancel()

    def _take(self, adopt: Adopt) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                if not data:
                    return self.close()  # the hub is gone
                connection = socket.socket(fileno=descriptors[0])
                connection.setblocking(False)
                self._adopting.start(adopt(connection))
