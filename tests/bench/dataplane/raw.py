"""Clients of a data plane that send the bytes of HTTP themselves, for what no library sends."""

from __future__ import annotations

from http.client import HTTPMessage, parse_headers
from typing import NamedTuple

from tests.bench.dataplane.upgrades import dial

LOCAL = "host: 127.0.0.1\r\n"


class Response(NamedTuple):
    status: int
    headers: HTTPMessage
    body: bytes


class Raw:
    """A connection to the server at this URL."""

    def __init__(self, url: str) -> None:
        self.socket = dial(url)
        self._received = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._received.close()
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Whether the server still takes data."""
        try:
            self.socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def get(self, path: str, key: str | None = None) -> bool:
        """Ask for a path; the response is to be read."""
        shown = "" if key is None else f"authorization: Bearer {key}\r\n"
        return self.send(f"GET {path} HTTP/1.1\r\n{LOCAL}{shown}\r\n".encode())

    def response(self) -> Response:
        """The next response, whose body has a stated length."""
        status = int(self._received.readline().split()[1])
        headers = parse_headers(self._received)
        return Response(status, headers, self._received.read(int(headers["content-length"])))

    def status(self) -> int:
        return self.response().status

    def wait_for_end(self) -> bytes:
        """All that the server sends until it ends the connection."""
        received = b""
        try:
            while part := self._received.read1():
                received += part
        except ConnectionResetError:
            pass
        return received
