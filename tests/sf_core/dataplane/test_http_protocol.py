"""Requests that ask the data plane for another protocol, which RFC 9110 lets a server ignore."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from http.client import HTTPResponse
from urllib.parse import urlsplit

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.planes import ServedPlane, answering
from tests.patience import patience

H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
QUESTION = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def request(method: str, path: str, headers: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def dial(plane: ServedPlane) -> socket.socket:
    url = urlsplit(plane.url)
    assert url.hostname is not None
    return socket.create_connection((url.hostname, url.port or 80), patience())


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


@pytest.mark.parametrize("headers", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_a_post_that_asks_for_another_protocol_is_answered_with_its_whole_body(
    served_plane: ServedPlane, renderer: Renderer, headers: str
) -> None:
    served_plane.register()
    served_plane.connect(answering(renderer, "hello"))
    # more than the server reads at once
    body = json.dumps({**QUESTION, "metadata": {"note": "x" * 300_000}}).encode()
    with dial(served_plane) as connection:
        for _ in range(2):
            connection.sendall(request("POST", "/v1/chat/completions", headers, body))
            status, answer = read_response(connection)
            assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, "hello")


@pytest.mark.parametrize("path", ["/v1/models", "/engines"])
def test_only_a_get_of_the_engines_path_opens_a_websocket(served_plane: ServedPlane, path: str) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    plain, asking = (request(method, path, headers, b"{}") for headers in ("", WEBSOCKET))
    with dial(served_plane) as connection:
        connection.sendall(plain)
        expected = read_response(connection)
        connection.sendall(asking)
        assert read_response(connection) == expected
    with served_plane.dial() as engine:
        assert engine.response is not None
        assert engine.response.status_code == 101


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_that_offers_http2_is_answered(served_plane: ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    served_plane.connect(answering(renderer, "hello"))
    url = f"{served_plane.url}/v1/chat/completions"
    command = [
        "curl",
        "--silent",
        "--http2",
        "--max-time",
        str(patience()),
        "--json",
        json.dumps(QUESTION),
        url,
    ]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert answer["choices"][0]["message"]["content"] == "hello"
