"""Clients that take places, memory and time of a data plane before they have shown a key."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sf_core.dataplane.connections import most_connections
from sf_core.dataplane.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED
from tests.bench import dataplane, waits
from tests.bench.dataplane import planes

KEY = "a-key-of-the-test"
SHORT_S = 0.2
"""Time in which requests must arrive, where a test waits for its end."""
START = f"GET /healthz HTTP/1.1\r\n{dataplane.raw.LOCAL}".encode()
SIGNED = f"authorization: Bearer {KEY}\r\n"
CHUNKED = f"POST /runs HTTP/1.1\r\n{dataplane.raw.LOCAL}{SIGNED}transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with planes.running_app(key=KEY) as url:
        yield url


@pytest.fixture(scope="module")
def hasty_url() -> Iterator[str]:
    with planes.running_app(key=KEY, request_timeout_s=SHORT_S) as url:
        yield url


def is_served(url: str) -> bool:
    """Whether a new client with the key is answered."""
    with planes.operator_client(url, KEY) as http:
        return http.get("/healthz").json() == {"runs": 0}


ENDLESS = {
    "headers": (START, b"x: y\r\n"),
    "a header": (START + b"x: ", b"y" * 1000),
    "the name of a header": (START, b"x" * 1000),
    "a path": (b"GET /", b"x" * 1000),
    "headers after a body": (f"{CHUNKED}1\r\n{{\r\n0\r\n".encode(), b"x: y\r\n"),
    "the extension of a chunk": (f"{CHUNKED}1;".encode(), b"x" * 1000),
}


@pytest.mark.parametrize(("begin", "piece"), ENDLESS.values(), ids=ENDLESS)
def test_endless_heads_are_refused(url: str, begin: bytes, piece: bytes) -> None:
    with dataplane.raw.Raw(url) as raw:
        assert raw.send(begin)
        for _ in range(2 * MAX_HEAD_BYTES // len(piece)):
            raw.send(piece)
        response = raw.response()
        assert (response.status, response.headers["connection"]) == (431, "close")
        assert json.loads(response.body)["error"]["message"] == (
            f"A request may have at most {MAX_HEADERS} headers, and {MAX_HEAD_BYTES} bytes of them with its "
            "first line."
        )
        # whatever is sent now, the connection ends
        assert raw.wait_for_end() == b""
        waits.wait_until(lambda: not raw.send(piece))
    assert is_served(url)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([b"x: y"] * (MAX_HEADERS - 2), 200),
        ([b"x: y"] * MAX_HEADERS, 431),
        ([b"x: " + b"y" * (MAX_HEAD_BYTES - 200)], 200),
        ([b"x: " + b"y" * MAX_HEAD_BYTES], 431),
    ],
    ids=["many", "too many", "long", "too long"],
)
def test_whole_heads_have_the_same_limits(url: str, headers: list[bytes], status: int) -> None:
    lines = [START.rstrip(), f"authorization: Bearer {KEY}".encode(), *headers, b"", b""]
    with dataplane.raw.Raw(url) as raw:
        raw.send(b"\r\n".join(lines))
        assert raw.status() == status


def test_a_large_body_is_none_of_the_head(url: str) -> None:
    # of many small pieces, which have more bytes around them than in them
    pieces = b"1\r\n \r\n" * MAX_HEAD_BYTES
    with dataplane.raw.Raw(url) as raw:
        raw.send(CHUNKED.encode() + pieces + b"0\r\nx: y\r\n\r\n" + START + b"\r\n")
        # it is read to its end, and then has no field of a run
        assert (raw.status(), raw.status()) == (400, 401)


def test_requests_that_wait_behind_another_are_few(url: str) -> None:
    ask = f"GET /healthz HTTP/1.1\r\n{dataplane.raw.LOCAL}authorization: Bearer {KEY}\r\n\r\n".encode()
    with dataplane.raw.Raw(url) as raw:
        raw.send(ask * MAX_PIPELINED)
        assert {raw.status() for _ in range(MAX_PIPELINED)} == {200}
    with dataplane.raw.Raw(url) as raw:
        raw.send(ask * 10 * MAX_PIPELINED)
        assert raw.wait_for_end().count(b"HTTP/1.1 200") <= 1
    assert is_served(url)


@pytest.mark.parametrize("begun", [START, b"GET /hea", f"{CHUNKED}5\r\n{{".encode()])
def test_half_of_a_request_is_given_up(hasty_url: str, begun: bytes) -> None:
    with dataplane.raw.Raw(hasty_url) as raw:
        raw.send(begun)
        response = raw.response()
        assert response.status == 408
        assert json.loads(response.body)["error"]["message"] == (
            f"The headers of a request must arrive within {SHORT_S:g} s, and so must each part of its body."
        )
        assert raw.wait_for_end() == b""


@pytest.mark.parametrize("begun", [b"", b"\r\n"])
def test_a_connection_without_a_request_is_given_up(hasty_url: str, begun: bytes) -> None:
    with dataplane.raw.Raw(hasty_url) as raw:
        raw.send(begun)
        assert raw.wait_for_end() == b""


def test_a_body_behind_a_refusal_is_given_up(hasty_url: str) -> None:
    head = f"POST /runs HTTP/1.1\r\n{dataplane.raw.LOCAL}content-length: 1000000\r\n\r\n"
    with dataplane.raw.Raw(hasty_url) as raw:
        raw.send(head.encode())
        assert raw.status() == 401
        # neither does its rest keep the connection, however it is sent
        waits.wait_until(lambda: not raw.send(b"x"), every_s=SHORT_S / 10)


def test_who_has_shown_a_key_keeps_the_place(tmp_path: Path) -> None:
    with planes.running_app(key=KEY, max_connections=20) as url, contextlib.ExitStack() as stack:
        known = stack.enter_context(dataplane.raw.Raw(url))
        known.get("/healthz", KEY)
        assert known.status() == 200
        # idle, with half a request, and with a wrong key
        others = [stack.enter_context(dataplane.raw.Raw(url)) for _ in range(60)]
        for index, other in enumerate(others):
            if index % 3 == 1:
                other.send(START)
            elif index % 3 == 2:
                other.get("/healthz", "wrong")
        # the first have given way
        assert others[0].wait_for_end() == b""
        assert is_served(url)
        known.get("/healthz", KEY)
        assert known.status() == 200


def test_without_a_place_newcomers_are_told_to_come_again(caplog: pytest.LogCaptureFixture) -> None:
    with planes.running_app(key=KEY, max_connections=3) as url, contextlib.ExitStack() as stack:
        known = [stack.enter_context(dataplane.raw.Raw(url)) for _ in range(3)]
        for one in known:
            one.get("/healthz", KEY)
            assert one.status() == 200
        late = stack.enter_context(dataplane.raw.Raw(url))
        late.get("/healthz", KEY)
        response = late.response()
        assert (response.status, response.headers["retry-after"]) == (503, "5")
        assert json.loads(response.body)["error"] == {
            "message": "The data plane serves 3 connections, the most that it may have: send the request "
            "again later.",
            "type": "server_error",
            "param": None,
            "code": "connections_full",
        }
        stack.enter_context(dataplane.raw.Raw(url)).wait_for_end()
        told = [record.getMessage() for record in caplog.records if "connections" in record.name]
        assert told == [
            "all 3 connections are in use, so further ones are refused: raise the limit on open files "
            "(`ulimit -n`) or --max-connections"
        ]
        known[0].close()
        waits.wait_until(lambda: is_served_now(url))


def is_served_now(url: str) -> bool:
    try:
        return is_served(url)
    except (httpx.HTTPError, ValueError):
        return False


def test_at_256_open_files_idle_connections_shut_nobody_out(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "sf_core", "dataplane", "--port", "0", "--port-file", str(port_file)]
    limited = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
    environment = {**os.environ, "SF_DATAPLANE_KEY": KEY}
    with (
        subprocess.Popen(limited, env=environment, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        try:
            waits.wait_until(port_file.exists)
            url = f"http://127.0.0.1:{port_file.read_text(encoding='utf-8')}"
            http = stack.enter_context(planes.operator_client(url, KEY))
            assert http.get("/healthz").status_code == 200
            idle = [stack.enter_context(dataplane.raw.Raw(url)) for _ in range(300)]
            # an old one has ended, so all have been accepted
            assert idle[0].wait_for_end() == b""
            assert is_served(url)
            assert http.get("/healthz").status_code == 200
        finally:
            process.terminate()
        _, said = process.communicate(timeout=waits.patience())
        assert said == ""


def test_files_are_left_for_journals_and_tables() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        rooms = {}
        for num_files in (256, 1024, 4096):
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
            rooms[num_files] = most_connections(None)
        assert rooms == {256: 192, 1024: 768, 4096: 3072}
        assert most_connections(4000) == 4000
        sentence = (
            "--max-connections 5000 needs 5064 open files, but this process may open 4096: raise that limit "
            "with `ulimit -n`, or choose fewer connections"
        )
        with pytest.raises(ValueError) as refused:
            most_connections(5000)
        assert str(refused.value) == sentence
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
