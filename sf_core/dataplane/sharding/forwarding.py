"""Agents' requests that come to the hub's own port, passed on to the process that serves their session.

Owns which session a request names, and passing on its answer as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.gateway.agent_routes import REFUSALS
from sf_core.dataplane.gateway.dialects.registry import AGENTS_PATH
from sf_core.dataplane.gateway.endpoint import read_body
from sf_core.dataplane.gateway.keys import Caller

_OF_THE_CONNECTION = {b"connection", b"expect", b"keep-alive", b"transfer-encoding"}
_OF_THE_SERVER = _OF_THE_CONNECTION | {b"date"}
"""Response headers that the server on this side sets itself."""


def session_of(scope: Scope, plane_key: str | None) -> str | None:
    """The session that a request of an agent names; None if it names none."""
    path = AGENTS_PATH.fullmatch(scope["path"])
    caller = Caller.of(scope, None if plane_key is None else plane_key.encode())
    return caller.session_id({"path_params": path.groupdict() if path else {}})


class Forwarding:
    """ASGI middleware of the hub, which serves no turns itself."""

    def __init__(self, app: ASGIApp, url_of: Callable[[str | None], str], key: str | None) -> None:
        """`url_of` names a process for a session; None: any, for a request that names no session."""
        self._app, self._url_of, self._key = app, url_of, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with _client() as self._client:
                return await self._app(scope, receive, send)
        if scope["type"] != "http" or AGENTS_PATH.fullmatch(scope["path"]) is None:
            return await self._app(scope, receive, send)
        try:
            await self._forward(scope, receive, send)
        except ApiError as error:
            await refuse(error, scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError while nothing is sent; later errors break the client's connection."""
        body = await read_body(receive)
        answering = asyncio.ensure_future(self._answer(scope, body, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            # a client that went away takes its request with it: the gateway sees the connection close
            answering.cancel()
            leaving.cancel()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        async with await self._ask(scope, body) as response:
            passed_on = [(n.lower(), v) for n, v in response.raw_headers if n.lower() not in _OF_THE_SERVER]
            await send({"type": "http.response.start", "status": response.status, "headers": passed_on})
            async for data in response.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _ask(self, scope: Scope, body: bytes) -> aiohttp.ClientResponse:
        """Send a request on; returns the head of the answer. It waits for a process that is being restarted,
        whose port stays open. Raises ApiError 503 if the process ends before it answers."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OF_THE_CONNECTION
        ]
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url = self._url_of(session_of(scope, self._key)) + scope["raw_path"].decode("latin-1") + query
        try:
            return await self._client.request(
                scope["method"],
                URL(url, encoded=True),
                data=body or None,
                headers=headers,
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            # the turn may have begun: only the client can say that it retries
            raise absent(f"ended while it worked on this ({type(error).__name__})") from None


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def absent(why: str) -> ApiError:
    """The error for a client that should retry."""
    message = f"The process that serves this session {why}; try again."
    return ApiError(503, message, code="gateway_restarting", retry_after_s=RETRY_AFTER_S)


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response = await REFUSALS[ApiError](Request(scope), error)
    await response(scope, receive, send)
