"""Metrics, trace spans and keep-alive of streams, over real HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan
from starlette.types import Message

from sf_core.config.rollout_config import REASONS
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.gateway import observed
from sf_core.dataplane.gateway.observed import KeepAliveExchange
from tests.bench import waits
from tests.bench.dataplane import planes
from tests.bench.dataplane.figures import figures

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def ask(plane: planes.ServedPlane, path: str = CHAT, **options: Any) -> httpx.Response:
    body = {"model": "policy", "messages": HI} | options
    return plane.http.post(path, json=body, headers=plane.agent_headers(path))


def test_figures_count_what_agents_asked_and_got(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    # what earlier tests asked
    before = figures(served_plane)
    served_plane.register()
    answer = planes.say(renderer, "hello there")
    served_plane.connect(lambda prompt, seed: answer)
    [claim] = served_plane.claim()
    path = f"/sessions/{claim['session_id']}{CHAT}"
    first = ask(served_plane, path).json()
    grown = [*HI, first["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = ask(served_plane, path, messages=grown).json()
    ask(served_plane, path, model="other")
    seen = {name: number - before.get(name, 0) for name, number in figures(served_plane).items()}
    assert seen["sf_requests_total", "chat", "200"] == 2
    assert seen["sf_requests_total", "chat", "404"] == 1
    assert seen["sf_sampled_tokens_total", "run"] == 2 * len(answer)
    reused = first["usage"]["total_tokens"]
    assert seen["sf_prompt_tokens_total", "reused"] == reused
    asked = first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]
    assert seen["sf_prompt_tokens_total", "encoded"] == asked - reused
    assert seen["sf_engines", "run", "serving"] == 1
    assert (seen["sf_requests_waiting", "run"], seen["sf_requests_running", "run"]) == (0, 0)
    assert seen["sf_sessions_running", "run"] == 1
    for histogram in ("sf_gateway_overhead_seconds", "sf_wait_seconds", "sf_engine_seconds"):
        assert seen[f"{histogram}_count",] == 2
    assert seen["sf_agent_bytes_total", "from_agents"] > 0
    assert seen["sf_engine_bytes_total", "from_engines", "run"] > 0


def test_a_run_without_engines_has_none_in_any_state_and_a_released_run_no_gauges(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    seen = figures(served_plane)
    states = ("loading", "leaving", "paused", "serving")
    assert [seen["sf_engines", "run", state] for state in states] == [0, 0, 0, 0]
    assert seen["sf_policy_version", "run"] == 0
    served_plane.post("/runs/run/release")
    seen = figures(served_plane)
    assert [name for name, *labels in seen if "run" in labels and not name.endswith("_total")] == []
    assert seen["sf_sampled_tokens_total", "run"] == 0
    served_plane.register(attempt=2)
    assert ("sf_policy_version", "run") in figures(served_plane)


def test_branches_are_counted_by_reason_before_and_after_a_session_ends(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "hello"))
    [claim] = served_plane.claim()
    path = f"/sessions/{claim['session_id']}"
    for _ in range(3):
        ask(served_plane, path + CHAT)
    assert figures(served_plane)["sf_branches_total", "asked_again", "run"] == 2
    served_plane.post(path + "/finish", {"status": "finished", "reward": 1.0})
    assert figures(served_plane)["sf_branches_total", "asked_again", "run"] == 2


def test_ends_of_sessions_and_groups_are_counted_and_rewards_shown(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(group_size=1, groups_per_batch=1, session_attempts=1, on_max_lag="drop")
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "hello"))
    assert figures(served_plane)["sf_sessions_total", "failed", "run"] == 0
    assert ("sf_reward_recent", "run") not in figures(served_plane)

    def ask_and_finish(claim: dict[str, Any], **report: Any) -> None:
        ask(served_plane, f"/sessions/{claim['session_id']}{CHAT}")
        if report:
            served_plane.post(f"/sessions/{claim['session_id']}/finish", report)

    failing, old = served_plane.claim(2)
    ask_and_finish(failing, status="failed", error="x")
    ask_and_finish(old)
    running = [old["session_id"]]
    for batch in range(2):
        [claim] = served_plane.claim(1, running=running)
        ask_and_finish(claim, status="finished", reward=0.5 + batch)
        served_plane.post(f"/runs/run/batches/{batch}/seal", {"attempt": 1})
        served_plane.post("/runs/run/weights", {"version": batch + 1, "uri": "w"})
    served_plane.claim(1)
    served_plane.claim(0)
    seen = figures(served_plane)
    ends = {key: number for key, number in seen.items() if key[0] in ("sf_sessions_total", "sf_groups_total")}
    assert ends == {
        ("sf_sessions_total", "finished", "run"): 2,
        ("sf_sessions_total", "failed", "run"): 1,
        ("sf_sessions_total", "lost", "run"): 1,
        ("sf_sessions_total", "cut", "run"): 0,
        ("sf_groups_total", "sealed", "run"): 2,
        ("sf_groups_total", "agent_error", "run"): 1,
        ("sf_groups_total", "max_lag", "run"): 1,
    }
    assert seen["sf_reward_recent", "run"] == 1.0
    failures = {key[1]: number for key, number in seen.items() if key[0] == "sf_failures_total"}
    assert failures == dict.fromkeys(REASONS, 0) | {"agent_error": 1}


class RecordingTracer(trace.Tracer):
    """Tracer with the OpenTelemetry API's interface, as an SDK would implement it."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def start_span(
        self, name: str, context: Any = None, kind: Any = None, attributes: Any = None, **_: Any
    ) -> Any:
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append({"name": name, "parent": parent, **attributes})
        return NonRecordingSpan(parent)

    @contextmanager
    def start_as_current_span(self, *_: Any, **__: Any) -> Iterator[Any]:
        # the interface demands it; turns overlap on one event loop: no span may be the current one
        raise AssertionError("a turn's span was made the current one")
        yield


def test_each_turn_is_a_span_of_the_agents_trace(
    served_plane: planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = RecordingTracer()
    monkeypatch.setattr(observed, "_tracer", tracer)
    served_plane.register()
    answer = planes.say(renderer, "hello")
    served_plane.connect(lambda prompt, seed: answer)
    served_plane.http.headers["traceparent"] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    [claim] = served_plane.claim()
    ask(served_plane, f"/sessions/{claim['session_id']}{CHAT}")
    del served_plane.http.headers["traceparent"]
    ask(served_plane)
    waits.wait_until(lambda: len(tracer.spans) == 2)
    first, second = tracer.spans
    assert format(first["parent"].trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert not second["parent"].is_valid
    assert first["sf.session"] == claim["session_id"]
    assert (first["sf.engines"], first["sf.interruptions"], first["sf.policy_version"]) == (["r0"], 0, 0)
    assert first["gen_ai.usage.output_tokens"] == len(answer)


def test_a_stream_says_something_while_its_request_waits(
    served_plane: planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed, "KEEP_ALIVE_S", 0.02)
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "hello"))
    served_plane.post("/runs/run/pause")
    lines: list[str] = []

    def read() -> None:
        body = {"model": "policy", "messages": HI, "stream": True}
        with httpx.stream("POST", served_plane.url + CHAT, json=body, timeout=waits.patience()) as response:
            lines.extend(response.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    waits.wait_until(lambda: figures(served_plane)["sf_requests_waiting", "run"] == 1)
    waits.wait_until(lambda: lines.count("") >= 3 or not reader.is_alive())
    served_plane.post("/runs/run/resume")
    waits.join(reader)
    events = [line for line in lines if line]
    assert lines.count("") >= len(events) + 2  # one ends each event
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events)


async def nothing_comes() -> Message:
    await asyncio.sleep(10)
    raise AssertionError


async def test_a_client_that_does_not_read_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "SLOW_READER_S", 0.01)

    async def full(message: Message) -> None:
        await asyncio.sleep(10)

    async with asyncio.timeout(waits.patience()):
        connection = KeepAliveExchange(nothing_comes, full)
        watching = asyncio.ensure_future(connection.receive())
        await asyncio.sleep(0)
        for _ in range(2):
            await connection.send({"type": "http.response.body", "body": b"x", "more_body": True})
        assert await watching == await connection.receive() == {"type": "http.disconnect"}


async def test_a_watcher_that_is_cancelled_is_cancelled() -> None:
    watching = asyncio.ensure_future(
        KeepAliveExchange(nothing_comes, lambda message: asyncio.sleep(0)).receive()
    )
    await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


def test_a_turn_whose_reader_is_given_up_is_sampled_no_further(
    served_plane: planes.ServedPlane, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed, "SLOW_READER_S", 0.1)
    served_plane.register(context_length=1_000_000)
    # more than any socket holds, and than is sampled until the reader is given up
    endless = renderer.encode(" fox").tolist() * 500_000
    served_plane.connect(lambda prompt, seed: endless, tokens_per_step=500)
    body = orjson.dumps({"model": "policy", "messages": HI, "stream": True, "logprobs": True})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect((served_plane.http.base_url.host, served_plane.http.base_url.port))
        deaf.sendall(head.encode() + body)
        waits.wait_until(lambda: served_plane.get("/runs/run")["counters"].get("abandoned_turns") == 1)
        waits.wait_until(lambda: served_plane.engines["r0"].num_requests == 0)


async def test_no_empty_line_comes_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "KEEP_ALIVE_S", 0.001)
    sent: list[bytes] = []

    async def write(message: Message) -> None:
        await asyncio.sleep(0.002)
        sent.append(message.get("body", b""))

    send = KeepAliveExchange(nothing_comes, write).send
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for body, more in ((b"a", True), (b"b", False)):
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": body, "more_body": more})
    await asyncio.sleep(0.01)
    assert sent[-1] == b"b" and b"\n" in sent
