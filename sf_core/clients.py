"""Clients for the endpoints of sessions: a key for each session, and connections for each event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import cache
from ssl import SSLContext

import httpx2
from openai import AsyncOpenAI, DefaultAioHttpClient

_NO_LIMIT = httpx2.Limits(max_connections=0)
"""A runner has as many sessions at a time as `rollout.concurrency` says, and each may wait for its answer."""


def open_client(base_url: str, api_key: str) -> AsyncOpenAI:
    """A client with this key. Raises RuntimeError, one sentence, outside of an event loop."""
    return AsyncOpenAI(
        base_url=base_url,
        api_key=api_key,
        http_client=_shared_connections(),
        timeout=None,  # the endpoint may hold a request while the policy trains; sessions have a time limit
        max_retries=5,
    )


class _Connections(DefaultAioHttpClient):
    """The connections of an event loop. With aiohttp a request costs 1.4 ms of CPU at 512 sessions, with the
    default transport 3.2 ms."""

    async def aclose(self) -> None:
        """Nothing: a session that closes its client must not close the connections of others."""

    async def close(self) -> None:
        await super().aclose()


@cache
def _tls() -> SSLContext:
    """Cached, because to read all certificate authorities takes 20 ms, more than a session (decision 065)."""
    return httpx2.create_ssl_context()


def _shared_connections() -> _Connections:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "endpoint.client() needs a running event loop: call it in an `async def` function, or use "
            "openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) in a plain function"
        ) from None
    if loop not in _by_loop:
        connections = _Connections(limits=_NO_LIMIT, verify=_tls())
        closing = _close_with_the_loop(loop, connections)
        _by_loop[loop] = connections, closing
        with suppress(StopIteration):
            closing.asend(None).send(None)
    return _by_loop[loop][0]


async def _close_with_the_loop(
    loop: asyncio.AbstractEventLoop, connections: _Connections
) -> AsyncGenerator[None]:
    """An event loop ends the asynchronous generators begun on it before it closes: the only moment at which
    the connections are no longer used and can still be closed."""
    try:
        yield
    finally:
        # connections hold their loop, which would stay in memory with them
        _by_loop.pop(loop, None)
        await connections.close()


_by_loop: dict[asyncio.AbstractEventLoop, tuple[_Connections, AsyncGenerator[None]]] = {}
