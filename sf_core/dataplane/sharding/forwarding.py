"""Forwarding of requests that reach a process on a kept-alive connection but belong to another.

Owns the request to the owner over its Unix socket, and passing on its answer as it comes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import aiohttp
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.gateway.dialects.registry import dialect_of
from sf_core.dataplane.gateway.endpoint import read_body
from sf_core.dataplane.sharding.owners import Owner, PathOwner, owner_of

RESTART_S = 30.0
"""Seconds for which a request waits for a process that is down: one that died is restarted."""

RETRY_S = 0.1

_OF_THE_CONNECTION = {b"connection", b"expect", b"keep-alive", b"transfer-encoding"}
_OF_THE_SERVER = _OF_THE_CONNECTION | {b"date"}
"""Response headers that the server on this side sets itself."""


def socket_path(folder: Path, owner: Owner) -> Path:
    """Socket on which a process serves the requests that others forward."""
    return folder / ("hub.sock" if owner is PathOwner.HUB else f"gateway{owner}.sock")


class Siblings:
    """The other processes of this data plane, over the Unix sockets in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clients: dict[Owner, aiohttp.ClientSession] = {}

    async def ask(self, owner: Owner, scope: Scope, body: bytes) -> aiohttp.ClientResponse:
        """Send a request to its owner; returns the head of the answer. Raises ApiError 503 if the owner is
        down and not back in time, or ends before it answers."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OF_THE_CONNECTION
        ]
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url = URL(f"http://gateway{scope['raw_path'].decode('latin-1')}{query}", encoded=True)
        deadline = time.monotonic() + RESTART_S
        while True:
            try:
                return await self._client(owner).request(
                    scope["method"], url, data=body or None, headers=headers, allow_redirects=False
                )
            except aiohttp.ClientConnectorError:
                if time.monotonic() > deadline:
                    raise absent(f"was not there for {RESTART_S:g} s") from None
                await asyncio.sleep(RETRY_S)
            except aiohttp.ClientError as error:
                # the owner may have begun the turn: only the client can say that it retries
                raise absent(f"ended while it worked on this ({type(error).__name__})") from None

    def _client(self, owner: Owner) -> aiohttp.ClientSession:
        if owner not in self._clients:
            self._clients[owner] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(socket_path(self._folder, owner)), limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._clients[owner]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


class Forwarding:
    """ASGI middleware that forwards requests which another process owns."""

    def __init__(
        self, app: ASGIApp, here: Owner, siblings: Siblings, key: str | None, num_gateways: int
    ) -> None:
        self._app, self._here, self._siblings, self._num_gateways = app, here, siblings, num_gateways
        self._key = None if key is None else key.encode()
        self._spread = itertools.cycle(range(num_gateways))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner: Owner = self._here
        if scope["type"] == "http":
            owner = owner_of(scope, self._key, self._num_gateways)
        if owner is PathOwner.ANYWHERE:
            owner = next(self._spread) if self._here is PathOwner.HUB else self._here
        if owner == self._here:
            return await self._app(scope, receive, send)
        try:
            await self._forward(owner, scope, receive, send)
        except ApiError as error:
            await refuse(scope, send, error)

    async def _forward(self, owner: Owner, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError while nothing is sent; later errors break the client's connection."""
        body = await read_body(receive)
        answering = asyncio.ensure_future(self._answer(owner, scope, body, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            # a client that went away takes its request with it: the owner sees the connection close
            answering.cancel()
            leaving.cancel()

    async def _answer(self, owner: Owner, scope: Scope, body: bytes, send: Send) -> None:
        async with await self._siblings.ask(owner, scope, body) as response:
            passed_on = [(n.lower(), v) for n, v in response.raw_headers if n.lower() not in _OF_THE_SERVER]
            await send({"type": "http.response.start", "status": response.status, "headers": passed_on})
            async for data in response.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def absent(why: str) -> ApiError:
    """The error for a client that should retry."""
    message = f"The process that serves this session {why}; try again."
    return ApiError(503, message, code="gateway_restarting", retry_after_s=RETRY_AFTER_S)


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    body = orjson.dumps(dialect_of(scope).error_body(error))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
