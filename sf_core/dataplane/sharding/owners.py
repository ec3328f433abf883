"""Which process answers a request: the hub, or the gateway process that owns its session."""

from __future__ import annotations

import re
from enum import Enum
from urllib.parse import unquote
from zlib import crc32

import httptools
from starlette.types import Scope

from sf_core.dataplane.gateway.keys import Caller

_AGENTS_PATH = re.compile(r"(?:/sessions/(?P<session_id>[^/]+))?/v1/.")


END_OF_HEAD = b"\r\n\r\n"


class PathOwner(Enum):
    HUB = "hub"
    """All requests but those of agents below /v1: commands on runs, and on sessions."""
    ANYWHERE = "anywhere"
    """Requests of agents that name no session: any gateway opens one for them."""


Owner = int | PathOwner
"""A number is the index of a gateway process, from 0."""


def gateway_of(session_id: str, num_gateways: int) -> int:
    return crc32(session_id.encode()) % num_gateways


def owner_of(scope: Scope, plane_key: bytes | None, num_gateways: int) -> Owner:
    """The owner of a request, by its path and its headers; its scope need not have passed a router."""
    if scope["type"] != "http" or _AGENTS_PATH.match(scope["path"]) is None:
        return PathOwner.HUB
    session_id = session_of(scope, plane_key)
    return PathOwner.ANYWHERE if session_id is None else gateway_of(session_id, num_gateways)


def session_of(scope: Scope, plane_key: bytes | None) -> str | None:
    """The session that a request of an agent names; None if it names none."""
    path = _AGENTS_PATH.match(scope["path"])
    return Caller.of(scope, plane_key).session_id({"path_params": path.groupdict() if path else {}})


def read_head(data: bytes) -> Scope | None:
    """Scope of the request that a connection's first bytes hold, as far as `owner_of` needs it; None if they
    are no whole head of an HTTP request."""
    end = data.find(END_OF_HEAD)
    if end < 0:
        return None
    head = _Head()
    try:
        httptools.HttpRequestParser(head).feed_data(data[: end + len(END_OF_HEAD)])
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError:
        return None
    is_websocket = (b"upgrade", b"websocket") in [(name, value.lower()) for name, value in head.headers]
    return {
        "type": "websocket" if is_websocket else "http",
        "path": unquote(httptools.parse_url(head.url).path.decode("latin-1")),
        "headers": head.headers,
    }


class _Head:
    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
