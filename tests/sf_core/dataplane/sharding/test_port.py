"""One port for several processes: which of them answers, and that clients cannot tell."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.sharding.owners import gateway_of
from tests.sf_core.dataplane.sharding.conftest import TWO
from tests.sf_core.dataplane.sharding.test_death import gateways
from tests.sf_core.dataplane.stand import Server, answering, running_process, say

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def paths_of_both(server: Server) -> list[str]:
    """Paths of one session of each gateway process."""
    by_owner = {gateway_of(claim["session_id"], 2): claim["session_id"] for claim in server.claim(8)}
    return [f"/sessions/{by_owner[owner]}{CHAT}" for owner in (0, 1)]


@pytest.fixture
def connection(server: Server) -> Iterator[httpx.Client]:
    """Client with a single kept-alive connection."""
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    with httpx.Client(base_url=server.url, limits=limits, timeout=20) as http:
        yield http


def test_a_connection_that_is_kept_open_serves_sessions_of_every_process(
    server: Server, renderer: Renderer, connection: httpx.Client
) -> None:
    server.register(groups_per_batch=10)
    server.connect(answering(renderer, "one", "two", "three"))
    first, second = paths_of_both(server)
    assert connection.post(first, json=BODY).json()["choices"][0]["message"]["content"] == "one"
    assert connection.post(second, json=BODY).json()["choices"][0]["message"]["content"] == "two"
    assert connection.get("/runs/run").json()["tokens_total"] > 0
    assert connection.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == "three"
    refused = connection.post("/sessions/none" + CHAT, json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")

    # of processes that are started again and restore their sessions, none says that there is no session
    for process in gateways():
        process.kill()
    answers = []

    def is_answered() -> bool:
        with suppress(httpx.TransportError):  # of the connection that went to a dead one
            answers.append(connection.post(second, json=BODY))
        return bool(answers) and answers[-1].status_code != 503

    server.wait_for(is_answered)
    assert answers[-1].json()["choices"][0]["message"]["content"] == "two", "the recorded answer"
    assert len(server.get(second.removesuffix(CHAT))["turns"]) == 1


def test_a_stream_that_another_process_gives_comes_piece_by_piece_and_ends_with_its_client(
    server: Server, renderer: Renderer, connection: httpx.Client
) -> None:
    server.register(groups_per_batch=10)
    server.connect(lambda prompt, seed: say(renderer, "the quick brown fox jumps over the lazy dog " * 3))
    first, second = paths_of_both(server)
    connection.post(first, json=BODY)
    server.engines["r0"].steps_left = 3
    with connection.stream("POST", second, json=BODY | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if '"content"' in line and '"content":""' not in line:
                break
        assert server.engines["r0"].num_requests == 1, "it is not over"
    server.wait_for(lambda: server.get("/runs/run")["counters"].get("abandoned_turns") == 1)


def test_a_request_that_comes_in_pieces_is_read_whole(server: Server, renderer: Renderer) -> None:
    server.register(groups_per_batch=10)
    server.connect(answering(renderer, "whole"))
    body = b'{"model":"policy","messages":[{"role":"user","content":"hi"}]}'
    head = f"POST {paths_of_both(server)[1]} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    data = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for start in range(0, len(data), 60):
            connection.sendall(data[start : start + 60])
            time.sleep(0.01)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"whole" in answer


def test_answers_are_byte_for_byte_those_of_one_process(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    one, two = (exchanges(tmp_path / name, model_dir, renderer, n) for name, n in (("one", 1), ("two", 2)))
    assert one == two


def exchanges(folder: Path, model_dir: str, renderer: Renderer, num_gateways: int) -> list[Any]:
    """Headers and bodies of answers, without timestamps."""
    folder.mkdir()
    options = ("--gateways", str(num_gateways))
    with (
        running_process(folder / "port", 0, *options) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        server = Server(url, http, folder, model_dir)
        server.register(groups_per_batch=10)
        server.connect(lambda prompt, seed: say(renderer, f"answer {seed % 1000}"), tokens_per_step=99)
        answers = []
        for path in paths_of_both(server):
            session = path.removesuffix(CHAT)
            for route, body in (
                (CHAT, BODY),
                (CHAT, BODY | {"stream": True}),
                (CHAT, BODY | {"model": "other"}),
                (CHAT, []),
                ("/v1/messages", BODY | {"max_tokens": 20}),
                ("/v1/messages/count_tokens", BODY),
                ("/v1/embeddings", {}),
            ):
                answers.append(http.post(session + route, json=body))
            answers += [http.get(session + "/v1/models"), http.get(session + CHAT)]
        http.post("/runs/run/release")
        server.threads[0].join(10)
    timeless = re.compile(rb'"created":\d+')
    return [[a.status_code, sorted(a.headers.keys()), timeless.sub(b"", a.content)] for a in answers]


def test_open_sessions_go_on_only_with_as_many_gateways_as_before(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with running_process(tmp_path / "port", 0, *TWO) as url, httpx.Client(base_url=url, timeout=60) as http:
        before = Server(url, http, tmp_path, model_dir)
        before.register()
        before.claim()
    with running_process(tmp_path / "port", 0) as url, httpx.Client(base_url=url, timeout=60) as http:
        after = Server(url, http, tmp_path, model_dir)
        with pytest.raises(AssertionError, match="start it with --gateways 2"):
            after.register(attempt=2)
    with running_process(tmp_path / "port", 0, *TWO) as url, httpx.Client(base_url=url, timeout=60) as http:
        again = Server(url, http, tmp_path, model_dir)
        again.register(attempt=2)
        again.claim(0)
