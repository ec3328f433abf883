from __future__ import annotations

import threading
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from sf_core.dataplane.engine_client import _BusySpans, serve_engine
from sf_core.dataplane.rendering import Renderer
from sf_core.engines.scripted import ScriptedEngine
from sf_core.types import WeightsRef
from tests.sf_core.dataplane.stand import Server, running_app, say

HELLO = {
    "run_id": "run",
    "attempt": 1,
    "lease_id": "r0",
    "epoch": 1,
    "engine_id": "r0",
    "worker": "r0",
    "max_running": 8,
}


def make(weights: WeightsRef) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, seed: [1], version=weights.version)


def refusal(server: Server, **hello: Any) -> str:
    return serve_engine(server.url, None, HELLO | hello, make, patience_s=5)


def test_an_engine_is_told_the_current_weights(server: Server, renderer: Renderer) -> None:
    server.register(version=3, weights_uri="w3", iteration=3)
    seen: list[WeightsRef] = []

    def make_seen(weights: WeightsRef) -> ScriptedEngine:
        seen.append(weights)
        return make(weights)

    thread = threading.Thread(target=serve_engine, args=(server.url, None, HELLO, make_seen))
    thread.start()
    server.wait_for(lambda: bool(server.live_engines()))
    server.post("/runs/run/release")
    thread.join(10)
    assert seen == [WeightsRef(3, "w3")]


def test_a_revoked_lease_ends_also_when_it_comes_late(server: Server, renderer: Renderer) -> None:
    server.register()
    server.connect(lambda prompt, seed: say(renderer, "x"), lease="r0")
    assert server.post("/runs/run/leases/r0/revoke") == {"engines": 1}
    assert server.post("/runs/run/leases/t0-1/revoke") == {"engines": 0}
    server.threads[0].join(10)
    assert server.reasons == {"r0": "revoked"}
    assert refusal(server, lease_id="t0-1") == "revoked"


def test_what_is_stale_is_turned_away(server: Server, renderer: Renderer) -> None:
    server.register()
    server.connect(lambda prompt, seed: say(renderer, "x"), lease="r0", epoch=5)
    assert refusal(server, epoch=4) == "superseded by a later start of the same lease"
    server.register(attempt=2)
    server.threads[0].join(10)
    assert server.reasons["r0"] == "superseded by a later attempt of the flow"
    assert refusal(server, lease_id="other") == "superseded by a later attempt of the flow"
    server.post("/runs/run/release")
    assert refusal(server, lease_id="other", attempt=2) == "released"


def test_a_later_start_of_a_lease_takes_the_place_of_the_earlier(server: Server, renderer: Renderer) -> None:
    server.register()
    server.connect(lambda prompt, seed: say(renderer, "x"), lease="r0", epoch=1, engine_id="old")
    server.connect(lambda prompt, seed: say(renderer, "x"), lease="r0", epoch=2, engine_id="new")
    server.wait_for(lambda: [e["id"] for e in server.live_engines()] == ["new"])


def test_an_engine_waits_for_its_run_to_be_registered(server: Server, renderer: Renderer) -> None:
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(refusal(server)))
    thread.start()
    server.register()
    server.wait_for(lambda: bool(server.live_engines()))
    server.post("/runs/run/release")
    thread.join(10)
    assert reasons == ["released"]


def test_an_engine_gives_up_on_a_data_plane_that_stays_away() -> None:
    with pytest.raises(ConnectionError, match="data plane at ws://127"):
        serve_engine("http://127.0.0.1:9", None, HELLO, make, patience_s=0.3)


def test_a_wrong_key_is_no_reason_to_try_again() -> None:
    with running_app(key="secret") as url, pytest.raises(InvalidStatus):
        serve_engine(url, "wrong", HELLO, make)


def test_an_update_reaches_every_engine(server: Server, renderer: Renderer) -> None:
    server.register()
    for lease in ("r0", "t0"):
        server.connect(lambda prompt, seed: say(renderer, "x"), lease=lease)
    answer = server.post("/runs/run/weights", {"version": 1, "uri": "w1"})
    assert answer["engines"] == {"r0": 1, "t0": 1}
    assert [engine["version"] for engine in server.live_engines()] == [1, 1]
    assert server.http.post("/runs/run/weights", json={"version": 0, "uri": "w0"}).status_code == 409


def test_what_the_engine_raises_ends_the_lease(server: Server) -> None:
    server.register()

    def broken(weights: WeightsRef) -> ScriptedEngine:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        serve_engine(server.url, None, HELLO, broken)
    server.wait_for(lambda: server.get("/runs/run")["engines"] == [])


def test_steps_close_together_are_one_span_of_work() -> None:
    spans: list[tuple[float, float]] = []
    busy = _BusySpans(lambda start, end: spans.append((start, end)))
    for start in (1.0, 1.01, 1.04, 2.0):
        busy.add(start, start + 0.01)
    busy.end()
    assert spans == [(1.0, 1.05), (2.0, 2.01)]
