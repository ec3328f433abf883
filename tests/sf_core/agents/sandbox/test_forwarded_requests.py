"""Requests of programs in a sandbox: which of them reach the data plane. The forwarder needs no sandbox."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sf_core.agents.sandbox.forward import MAX_HEAD, forward
from sf_core.types import Endpoint
from tests.bench.dataplane import upgrades
from tests.bench.dataplane.planes import ServedPlane
from tests.bench.waits import join

REFUSED = (403, b"")


@contextmanager
def forwarded(plane: ServedPlane) -> Iterator[str]:
    """The URL at which a sandbox reaches the endpoint of its session."""
    (claim,) = plane.claim()
    with forwarded_to(f"{plane.url}/sessions/{claim['session_id']}/v1", claim["key"]) as url:
        yield url


@contextmanager
def forwarded_to(url: str, key: str) -> Iterator[str]:
    endpoint = Endpoint(url, key, "policy")
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    begun = threading.Event()
    ended = asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with forward(endpoint, listener) as inside:
            urls.append(inside.base_url)
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    begun.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        join(thread)
        loop.close()


def path_of(url: str) -> str:
    return "/" + url.split("/", 3)[3]


def ask(plane: ServedPlane, url: str, *, headers: str = "") -> bytes:
    """A request for an answer; its body is more than the forwarder reads at once."""
    body = json.dumps({**upgrades.QUESTION, "metadata": {"note": "x" * 300_000}}).encode()
    key = plane.agent_headers(path_of(url))["Authorization"]
    path = f"{path_of(url)}/chat/completions"
    return upgrades.encode_request("POST", path, body, headers=f"Authorization: {key}\r\n{headers}")


@pytest.mark.parametrize("protocol", upgrades.UPGRADES)
def test_a_request_that_asks_for_another_protocol_is_answered(
    answering_plane: ServedPlane, protocol: str
) -> None:
    plane = answering_plane
    with forwarded(plane) as url:
        with upgrades.dial(url) as connection:
            for headers in (upgrades.UPGRADES[protocol], ""):
                connection.sendall(ask(plane, url, headers=headers))
                assert upgrades.read_answer(connection).startswith("answer")
            # the parser still knows where requests begin
            connection.sendall(upgrades.encode_request("GET", "/runs/run"))
            assert upgrades.read_response(connection) == REFUSED
        with upgrades.dial(url) as another:
            another.sendall(ask(plane, url))
            assert upgrades.read_answer(another).startswith("answer")


@pytest.mark.parametrize("line", ["GET /runs/run", "CONNECT {}", "CONNECT example.org:80"])
def test_what_is_refused_ends_only_its_connection(answering_plane: ServedPlane, line: str) -> None:
    plane = answering_plane
    with forwarded(plane) as url:
        method, path = line.format(path_of(url)).split(" ")
        with upgrades.dial(url) as connection:
            connection.sendall(upgrades.encode_request(method, path))
            assert upgrades.read_response(connection) == REFUSED
        with upgrades.dial(url) as another:
            another.sendall(ask(plane, url))
            assert upgrades.read_answer(another).startswith("answer")


def test_a_head_that_does_not_end_is_not_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with forwarded_to(f"{address}/sessions/s/v1", "key") as url, upgrades.dial(url) as connection:
            head = f"GET {path_of(url)}/models HTTP/1.1\r\nx: "
            # no more, or the connection would be reset
            connection.sendall(head.encode().ljust(MAX_HEAD + 1, b"y"))
            assert upgrades.read_response(connection) == REFUSED
