"""Engines are not trusted: sending what cannot have been sampled costs the engine its connection, and the
agent nothing. Over the real WebSocket."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.engines import wire
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.protocol import Engine
from sf_core.engines.scripted import ScriptedEngine
from sf_core.types import Chunk, FinishReason, GenerationRequest
from tests import bench
from tests.bench.dataplane import planes
from tests.sf_core.dataplane.control.hello import HELLO

VERSION = 3
HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.fixture
def opened(served_plane: planes.ServedPlane) -> dict[str, Any]:
    served_plane.register(version=VERSION, weights_uri="w3", iteration=VERSION)
    return served_plane.client.post("/sessions", {"run_id": "run"})


@contextmanager
def engine(plane: planes.ServedPlane, lease: str = "r0") -> Iterator[ClientConnection]:
    """Socket of a serving engine, through which the test sends its tokens."""
    with plane.dial() as socket:
        socket.send(wire.pack(replace(HELLO, lease_id=lease, engine_id=lease, worker=lease)))
        socket.recv()
        socket.send(wire.pack(wire.Updated(VERSION)))
        yield socket


@contextmanager
def asking(
    plane: planes.ServedPlane, opened: dict[str, Any], **changes: Any
) -> Iterator[Future[httpx.Response]]:
    """Request of an agent, as a future response."""
    url = f"{plane.url}/sessions/{opened['session_id']}/v1/chat/completions"
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(httpx.post, url, json=HI | changes, timeout=bench.waits.patience())


def given(socket: ClientConnection) -> GenerationRequest:
    """The next request that the engine receives."""
    while True:
        frame = socket.recv(timeout=bench.waits.patience())
        assert isinstance(frame, bytes)
        submit = wire.read_from_data_plane(frame)
        if isinstance(submit, wire.Submit):
            return submit.whole_requests()[0]


def close_reason(socket: ClientConnection) -> tuple[int, str]:
    """Read until the data plane closes the connection; returns code and reason."""
    while True:
        try:
            socket.recv(timeout=bench.waits.patience())
        except ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.code, closed.rcvd.reason


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("ids", "logprobs", "version", "sentence"),
    [
        ([5, 6, 7], [-1.0, -1.0], VERSION, "sent 3 tokens with 2 log-probs"),
        ([5], [], VERSION, "sent 1 tokens with 0 log-probs"),
        ([], [-1.0], VERSION, "sent 0 tokens with 1 log-probs"),
        ([5, -1], [-1.0, -1.0], VERSION, "sent a token id that is not from 0 to "),
        ([10**6, 5], [-1.0, -1.0], VERSION, "sent a token id that is not from 0 to "),
        ([5, 6], [-1.0, math.nan], VERSION, "sent a log-prob that is not the logarithm of a probability"),
        ([5, 6], [-math.inf, -1.0], VERSION, "sent a log-prob that is not the logarithm of a probability"),
        ([5, 6], [-1.0, 0.01], VERSION, "sent a log-prob that is not the logarithm of a probability"),
        ([5], [-1.0], VERSION - 1, "sent tokens of version 2; expected 3 to 3"),
        ([5], [-1.0], VERSION + 1, "sent tokens of version 4; expected 3 to 3"),
        ([5] * 7, [-1.0] * 7, VERSION, "sent 9 tokens, but at most 8 were requested"),
    ],
)
def test_what_cannot_have_been_sampled_ends_the_engine_and_not_the_turn(
    served_plane: planes.ServedPlane,
    renderer: Renderer,
    opened: dict[str, Any],
    ids: list[int],
    logprobs: list[float],
    version: int,
    sentence: str,
) -> None:
    begun = planes.say(renderer, "xyz")[:2]
    with engine(served_plane) as faulty, asking(served_plane, opened) as asked:
        request_id = given(faulty).request_id
        # zero, but for rounding
        whole = Chunk(request_id, begun, [-1.0, 1e-6], VERSION)
        faulty.send(
            wire.pack(wire.Chunks([whole, Chunk(request_id, ids, logprobs, version, FinishReason.STOP)]))
        )
        code, reason = close_reason(faulty)
        assert (code, reason.startswith(f"the engine {sentence}")) == (wire.BAD_FRAME, True)
        served_plane.connect(lambda prompt, seed: planes.say(renderer, "xyz"), lease="r1")
        assert answer(asked.result()) == "xyz"
    # the next one was given what the first had sent before, and the turn has every token once
    assert served_plane.asked[0].prompt_ids[-2:] == begun
    [turn] = served_plane.get(f"/sessions/{opened['session_id']}")["turns"]
    assert (turn["num_tokens"], turn["versions"]) == (len(planes.say(renderer, "xyz")), [VERSION, VERSION])


@pytest.mark.parametrize(
    "frame",
    [
        ["chunks", [["0", [], [], VERSION, "bored"]]],
        ["chunks", [["0", [], []]]],
        ["chunks", [["0", b"1234", b"1234", VERSION, None]]],
        ["chunks", [[["0"], [], [], VERSION, None]]],
        ["chunks", [["0", [], [], "three", None]]],
        ["chunks", [["0", [0.5], [-1.0], VERSION, None]]],
        ["chunks", 7],
        ["updated", VERSION - 1],
        ["updated", VERSION + 1],
        ["updated", "three"],
        ["gossip"],
        ["yield", "now"],
        7,
        b"\xff",
        "text",
    ],
)
def test_a_frame_that_makes_no_sense_ends_its_engine_only(
    served_plane: planes.ServedPlane, opened: Any, frame: Any
) -> None:
    with engine(served_plane, "r0") as faulty, engine(served_plane, "r1"):
        bench.waits.wait_until(lambda: len(served_plane.live_engines()) == 2)
        faulty.send(frame if isinstance(frame, (bytes, str)) else msgspec.msgpack.encode(frame))
        code, reason = close_reason(faulty)
        assert code == wire.BAD_FRAME and reason
        assert [engine["id"] for engine in served_plane.live_engines()] == ["r1"]


def test_tokens_of_requests_that_the_engine_was_not_given_are_left_out(
    served_plane: planes.ServedPlane, renderer: Renderer, opened: dict[str, Any]
) -> None:
    with engine(served_plane) as socket, asking(served_plane, opened) as asked:
        request_id = given(socket).request_id
        ids = planes.say(renderer, "x")
        logprobs = [-1.0] * len(ids)
        end = Chunk(request_id, ids, logprobs, VERSION, FinishReason.STOP)
        socket.send(wire.pack(wire.Chunks([Chunk("unknown", ids, [], 99), end, end])))
        assert answer(asked.result()) == "x"
        assert [engine["tokens"] for engine in served_plane.live_engines()] == [len(ids)]


def test_a_request_that_ends_without_a_token_is_refused_and_its_session_goes_on(
    served_plane: planes.ServedPlane, renderer: Renderer, opened: dict[str, Any]
) -> None:
    sentence = "No engine gave a valid answer to this request: engine r0 ended the request without a token."
    with engine(served_plane) as socket:

        def end(reason: FinishReason, ids: list[int]) -> None:
            chunk = Chunk(given(socket).request_id, ids, [-1.0] * len(ids), VERSION, reason)
            socket.send(wire.pack(wire.Chunks([chunk])))

        with asking(served_plane, opened) as asked:
            end(FinishReason.LENGTH, [])
            error = asked.result().json()["error"]
            assert (asked.result().status_code, error["code"]) == (502, "engine_failed")
            assert error["message"] == sentence
        with asking(served_plane, opened, stream=True) as asked:
            end(FinishReason.STOP, [])
            events = [line[6:] for line in asked.result().text.splitlines() if line.startswith("data: ")]
            assert sentence in [
                json.loads(event).get("error", {}).get("message") for event in events if event != "[DONE]"
            ]
        with asking(served_plane, opened) as asked:
            end(FinishReason.STOP, planes.say(renderer, "x"))
            assert answer(asked.result()) == "x"
        [turn] = served_plane.get(f"/sessions/{opened['session_id']}")["turns"]
        assert turn["num_tokens"] == len(planes.say(renderer, "x"))


def test_a_request_that_no_engine_answers_rightly_does_not_end_them_all(
    served_plane: planes.ServedPlane, opened: dict[str, Any]
) -> None:
    with (
        engine(served_plane, "r0") as first,
        engine(served_plane, "r1") as second,
        engine(served_plane, "r2") as third,
    ):
        bench.waits.wait_until(lambda: len(served_plane.live_engines()) == 3)
        by_id = {"r0": first, "r1": second, "r2": third}

        def working() -> str:
            [name] = [engine["id"] for engine in served_plane.live_engines() if engine["running"]] or [""]
            return name

        with asking(served_plane, opened) as asked:
            for _ in range(2):
                bench.waits.wait_until(lambda: bool(working()))
                socket = by_id[working()]
                socket.send(wire.pack(wire.Chunks([Chunk(given(socket).request_id, [5], [], VERSION)])))
                assert close_reason(socket)[0] == wire.BAD_FRAME
            assert asked.result().status_code == 502
            assert "sent 1 tokens with 0 log-probs, as an engine did before" in asked.result().text
        assert len(served_plane.live_engines()) == 1
        tree = served_plane.get(f"/sessions/{opened['session_id']}")
        assert tree["turns"] == []


class Spoiled(ScriptedEngine):
    """An engine that reports a positive log-prob for every token."""

    def step(self) -> list[Chunk]:
        return [
            Chunk(c.request_id, c.token_ids, [1.0] * len(c.token_ids), c.version, c.finish_reason)
            for c in super().step()
        ]


@pytest.mark.parametrize("drive", [lambda engine: engine, bench.engines.self_running.SelfRunningEngine])
def test_the_lease_of_an_engine_that_is_dropped_ends_with_the_reason(
    served_plane: planes.ServedPlane, opened: dict[str, Any], drive: Callable[[ScriptedEngine], Engine]
) -> None:
    engine = drive(Spoiled(lambda prompt, seed: [5] * 8))
    with ThreadPoolExecutor(1) as pool:
        lease = pool.submit(serve_engine, served_plane.url, served_plane.key, HELLO, engine)
        bench.waits.wait_until(lambda: bool(served_plane.live_engines()))
        with asking(served_plane, opened) as asked:
            reason = (
                "^the data plane dropped this engine: the engine sent a log-prob that is not the logarithm"
            )
            with pytest.raises(ValueError, match=reason):
                lease.result(timeout=bench.waits.patience())
            served_plane.post("/runs/run/release")
            assert asked.result().is_error
