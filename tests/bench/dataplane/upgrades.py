"""Requests over a bare socket that ask for another protocol."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from urllib.parse import urlsplit

from tests.bench.waits import patience

UPGRADES = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n",
    "websocket": (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    ),
}

QUESTION = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def encode_request(method: str, path: str, body: bytes = b"", *, headers: str = "") -> bytes:
    """A request with these lines of headers, which end in CR and LF."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def dial(url: str) -> socket.socket:
    """A connection to the server of this URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), patience())


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next response."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def read_answer(connection: socket.socket) -> str:
    """The policy's answer in the next response."""
    status, body = read_response(connection)
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"])
