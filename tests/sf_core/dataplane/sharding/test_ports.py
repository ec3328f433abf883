"""A port for each process, and the hub's own for everything: which of them answers, and that clients cannot
tell."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from sf_core.cli.stack.local import free_port
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.server import serve
from sf_core.dataplane.sharding import hub
from sf_core.types import Endpoint, Task
from tests.e2e.echo_package import agent
from tests.sf_core.agents.test_runner import make_runner, run_until_ready
from tests.sf_core.dataplane.sharding.conftest import TWO
from tests.sf_core.dataplane.sharding.test_death import gateways
from tests.sf_core.dataplane.stand import (
    Server,
    answering,
    attended,
    base_url,
    running_process,
    say,
)

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def claims_of_both(server: Server) -> list[dict[str, Any]]:
    """A session of each gateway process."""
    by_port = {claim["port"]: claim for claim in server.claim(8)}
    return [by_port[port] for port in sorted(by_port)]


def paths_of_both(server: Server) -> list[str]:
    return [f"/sessions/{claim['session_id']}{CHAT}" for claim in claims_of_both(server)]


def test_the_ports_of_the_processes_follow_the_hubs(tmp_path: Path, model_dir: str) -> None:
    first = free_port(3)
    with (
        running_process(tmp_path / "port", first, *TWO) as url,
        attended(url, tmp_path, model_dir) as server,
    ):
        server.register(groups_per_batch=10)
        assert [claim["port"] for claim in claims_of_both(server)] == [first + 1, first + 2]
        with httpx.Client(base_url=url.replace("127.0.0.1", "localhost")) as http:
            opened = http.post("/sessions", json={"run_id": "run"}).json()
        assert re.match(rf"http://localhost:({first + 1}|{first + 2})/sessions/", opened["base_url"])


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TAKEN_S", 0.0)
    first = free_port(3)
    with (
        socket.create_server(("127.0.0.1", first + 2)),
        pytest.raises(OSError, match=f"^port {first + 2}, of its gateway process 1: Address already in use$"),
    ):
        serve("127.0.0.1", first, DataplaneOptions(num_gateways=2))


def test_a_runners_agents_ask_the_process_of_their_session(
    server: Server, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.register(group_size=1, groups_per_batch=8, num_batches=1)
    server.connect(answering(renderer, "42"))
    asked: list[Endpoint] = []

    async def noting_agent(task: Task, endpoint: Endpoint) -> str:
        asked.append(endpoint)
        return await agent(task, endpoint)

    run_until_ready(server, make_runner(server.url, agent=noting_agent))
    ports = {httpx.URL(endpoint.base_url).port for endpoint in asked}
    assert len(ports) == 2
    assert httpx.URL(server.url).port not in ports


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


def test_answers_are_byte_for_byte_those_of_one_process_on_either_port(
    server: Server, tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    passed_on, direct = (exchanges(server, renderer, attempt, bool(attempt - 1)) for attempt in (1, 2))
    (tmp_path / "one").mkdir()
    with (
        running_process(tmp_path / "port", 0) as url,
        attended(url, tmp_path / "one", model_dir) as alone,
    ):
        one, again = (exchanges(alone, renderer, attempt, False) for attempt in (1, 2))
    assert (passed_on, direct) == (one, again)


def exchanges(server: Server, renderer: Renderer, attempt: int, to_their_ports: bool) -> list[Any]:
    """Headers and bodies of answers to two sessions, without timestamps."""
    server.register(groups_per_batch=10, attempt=attempt)
    engine: dict[str, Any] = {"lease": f"r{attempt}", "attempt": attempt, "tokens_per_step": 99}
    server.connect(lambda prompt, seed: say(renderer, f"answer {seed % 1000}"), **engine)
    answers = []
    for claim in server.claim(8, runner=f"a{attempt}")[:8:5]:
        url = base_url(server, claim if to_their_ports else claim | {"port": None})
        for route, body in (
            ("/chat/completions", BODY),
            ("/chat/completions", BODY | {"stream": True}),
            ("/chat/completions", BODY | {"model": "other"}),
            ("/chat/completions", []),
            ("/messages", BODY | {"max_tokens": 20}),
            ("/messages/count_tokens", BODY),
            ("/embeddings", {}),
        ):
            answers.append(server.http.post(url + route, json=body))
        answers += [server.http.get(url + "/models"), server.http.get(url + "/chat/completions")]
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
