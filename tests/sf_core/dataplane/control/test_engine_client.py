from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.sync.server import ServerConnection, serve
from websockets.uri import parse_uri

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.engine_socket import Outbox
from sf_core.dataplane.operator_key import operator_key
from sf_core.engines import wire
from sf_core.engines.drivers import driver
from sf_core.engines.drivers.driver import BUSY_GAP_S, MAX_SPAN_S, Spans
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.protocol import Engine, EngineLostError, WeightsRefusedError
from sf_core.engines.scripted import ScriptedEngine
from sf_core.types import Chunk, WeightsRef
from tests import bench
from tests.bench.dataplane import planes
from tests.sf_core.dataplane.control.hello import HELLO


def make() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, seed: [1])


@pytest.fixture(
    params=[lambda engine: engine, bench.engines.self_running.SelfRunningEngine],
    ids=["steps", "runs by itself"],
)
def drive(request: pytest.FixtureRequest) -> Callable[[ScriptedEngine], Engine]:
    """Makes of a scripted engine one for either driver."""
    return request.param


def refusal(plane: planes.ServedPlane, **hello: Any) -> str:
    return serve_engine(plane.url, plane.key, replace(HELLO, **hello), make(), patience_s=5)


def test_an_engine_is_told_the_current_weights(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register(version=3, weights_uri="w3", iteration=3)
    seen: list[WeightsRef] = []

    class Seeing(ScriptedEngine):
        def update_weights(self, weights: WeightsRef) -> None:
            seen.append(weights)
            super().update_weights(weights)

    engine = Seeing(lambda prompt, seed: [1])
    thread = threading.Thread(target=serve_engine, args=(served_plane.url, served_plane.key, HELLO, engine))
    thread.start()
    bench.waits.wait_until(lambda: bool(served_plane.live_engines()))
    served_plane.post("/runs/run/release")
    bench.waits.join(thread)
    assert seen == [WeightsRef(3, "w3")]


def test_a_revoked_lease_ends_also_when_it_comes_late(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "x"), lease="r0")
    assert served_plane.post("/runs/run/leases/r0/revoke") == {"engines": 1, "dropped": 0}
    assert served_plane.post("/runs/run/leases/t0-1/revoke") == {"engines": 0, "dropped": 0}
    bench.waits.join(served_plane.threads[0])
    assert served_plane.reasons == {"r0": "revoked"}
    assert refusal(served_plane, lease_id="t0-1") == "revoked"


def test_what_is_stale_is_turned_away(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "x"), lease="r0")
    served_plane.register(attempt=2)
    bench.waits.join(served_plane.threads[0])
    assert served_plane.reasons["r0"] == "superseded by a later attempt of the flow"
    assert refusal(served_plane, lease_id="other") == "superseded by a later attempt of the flow"
    served_plane.post("/runs/run/release")
    assert refusal(served_plane, lease_id="other", attempt=2) == "released"


def test_no_proxy_stands_between_an_engine_and_its_data_plane(
    served_plane: planes.ServedPlane,
    proxy: bench.proxies.SilentProxy,
    drive: Callable[[ScriptedEngine], Engine],
) -> None:
    served_plane.register()
    served_plane.post("/runs/run/release")
    assert serve_engine(served_plane.url, served_plane.key, HELLO, drive(make())) == "released"
    assert not proxy.was_asked()


def test_a_later_start_of_a_lease_takes_the_place_of_the_earlier(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "x"), lease="r0", engine_id="old")
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "x"), lease="r0", epoch=1, engine_id="new")
    bench.waits.wait_until(lambda: [e["id"] for e in served_plane.live_engines()] == ["new"])
    assert refusal(served_plane) == "superseded by a later start of the same lease"


@settings(
    max_examples=bench.properties.examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_of_all_starts_that_have_said_hello_the_latest_serves(
    served_plane: planes.ServedPlane, epochs: list[int]
) -> None:
    """Whatever the order of their hellos; the same one again is a connection that broke."""
    served_plane.register()
    lease = f"r0-{uuid4()}"
    with ExitStack() as stack:
        for count, epoch in enumerate(epochs):
            socket = stack.enter_context(served_plane.dial())
            socket.send(wire.pack(wire.Hello("run", 1, lease, epoch, f"{epoch}", lease, 8)))
            answer = socket.recv()
            assert isinstance(answer, bytes)
            latest = max(epochs[: count + 1])
            assert isinstance(wire.read_from_data_plane(answer), wire.Yield) == (epoch < latest)
            engines = served_plane.get("/runs/run")["engines"]
            assert [e["id"] for e in engines if e["worker"] == lease] == [f"{latest}"]


def test_an_engine_waits_for_its_run_to_be_registered(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(refusal(served_plane)))
    thread.start()
    served_plane.register()
    bench.waits.wait_until(lambda: bool(served_plane.live_engines()))
    served_plane.post("/runs/run/release")
    bench.waits.join(thread)
    assert reasons == ["released"]


def test_an_engine_gives_up_on_a_data_plane_that_stays_away(
    drive: Callable[[ScriptedEngine], Engine],
) -> None:
    with pytest.raises(ConnectionError, match="data plane at ws://127"):
        serve_engine("http://127.0.0.1:9", None, HELLO, drive(make()), patience_s=0.3)


def test_a_wrong_key_is_no_reason_to_try_again(drive: Callable[[ScriptedEngine], Engine]) -> None:
    with planes.running_app(key="secret") as url, pytest.raises(InvalidStatus):
        serve_engine(url, "wrong", HELLO, drive(make()))


def test_patience_begins_when_the_connection_breaks_not_with_the_last_word_before(
    drive: Callable[[ScriptedEngine], Engine],
) -> None:
    patience_s = bench.waits.patience(0.2)
    connections: list[ServerConnection] = []

    def data_plane(socket: ServerConnection) -> None:
        connections.append(socket)
        socket.recv()
        if len(connections) > 1:
            return socket.send(wire.pack(wire.Yield("found again")))
        socket.send(wire.pack(wire.Welcome(WeightsRef(0, "w"), False)))
        socket.recv()
        time.sleep(2 * patience_s)

    with serve(data_plane, "127.0.0.1", 0) as plane:
        threading.Thread(target=plane.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{plane.socket.getsockname()[1]}"
        assert serve_engine(url, None, HELLO, drive(make()), patience_s=patience_s) == "found again"
        plane.shutdown()


def test_an_engine_gives_up_on_a_data_plane_that_hangs(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "HEARTBEAT_S", bench.waits.patience(0.3))
    failures: list[str] = []

    def serve_it() -> None:
        try:
            serve_engine(url, operator_key(url), HELLO, make(), patience_s=bench.waits.patience(0.5))
        except ConnectionError as error:
            failures.append(str(error))

    port_file = tmp_path / "port"
    words = ("dataplane", "--port", "0", "--port-file", str(port_file))
    with bench.forks.Fork(planes.PRELOADED, "sf_core", *words) as process:
        bench.waits.wait_until(port_file.exists)
        url = f"http://127.0.0.1:{port_file.read_text(encoding='utf-8')}"
        plane = planes.ServedPlane(url, planes.operator_client(url), tmp_path, model_dir)
        plane.register()
        thread = threading.Thread(target=serve_it)
        thread.start()
        bench.waits.wait_until(lambda: bool(plane.live_engines()))
        process.send_signal(signal.SIGSTOP)
        bench.waits.join(thread)
        process.kill()
    assert failures and "data plane at ws://" in failures[0]


def connect_silently(url: str) -> socket.socket:
    """Socket of an engine that starts serving and then neither reads nor answers, as on a dead machine."""
    host, port = url.removeprefix("http://").split(":")
    stream = socket.create_connection((host, int(port)))
    protocol = ClientProtocol(parse_uri(url.replace("http", "ws", 1) + "/engines"), max_size=None)
    request = protocol.connect()
    request.headers["Authorization"] = f"Bearer {operator_key(url)}"
    protocol.send_request(request)
    stream.sendall(b"".join(protocol.data_to_send()))
    protocol.receive_data(stream.recv(65536))
    for frame in (replace(HELLO, lease_id="silent"), wire.Updated(0)):
        protocol.send_binary(wire.pack(frame))
    stream.sendall(b"".join(protocol.data_to_send()))
    return stream


def test_what_a_dead_engine_had_continues_elsewhere(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with (
        planes.running_app(heartbeat_s=bench.waits.patience(1.0)) as url,
        planes.operator_client(url) as http,
    ):
        plane = planes.ServedPlane(url, http, tmp_path, model_dir)
        plane.register()
        with connect_silently(url):
            bench.waits.wait_until(lambda: bool(plane.live_engines()))
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            answers: list[httpx.Response] = []
            agent = threading.Thread(
                target=lambda: answers.append(
                    httpx.post(url + "/v1/chat/completions", json=body, timeout=bench.waits.patience())
                )
            )
            agent.start()
            bench.waits.wait_until(lambda: any(engine["running"] for engine in plane.live_engines()))
            plane.connect(lambda prompt, seed: planes.say(renderer, "alive"), lease="r1")
            bench.waits.join(agent)
        assert answers[0].json()["choices"][0]["message"]["content"] == "alive"
        assert [engine["worker"] for engine in plane.live_engines()] == ["r1"]
        plane.post("/runs/run/release")


def test_a_drained_engine_yields_and_is_not_taken_back(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, "x"), lease="r0")
    assert served_plane.post("/runs/run/engines/r0/drain") == {"running": 0}
    bench.waits.join(served_plane.threads[0])
    assert served_plane.reasons == {"r0": "drained"}
    assert refusal(served_plane, epoch=1) == "revoked"
    assert served_plane.http.post("/runs/run/engines/r0/drain").status_code == 404


def test_pausing_answers_when_engines_stand_still(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    for lease in ("r0", "r1"):
        served_plane.connect(lambda prompt, seed: planes.say(renderer, "x"), lease=lease)
    assert served_plane.post("/runs/run/pause", {"mode": "evacuate", "engine": "r0"})["engines"] == 1
    assert [engine["state"] for engine in served_plane.live_engines()] == ["paused", "serving"]
    assert served_plane.post("/runs/run/pause")["engines"] == 2
    served_plane.post("/runs/run/resume")
    assert [engine["state"] for engine in served_plane.live_engines()] == ["paused", "serving"]
    assert served_plane.http.post("/runs/run/pause", json={"engine": "other"}).status_code == 404
    assert "mode" in served_plane.http.post("/runs/run/pause", json={"mode": "x"}).text


async def test_frames_an_engine_does_not_read_are_bounded() -> None:
    full: list[bool] = []
    outbox = Outbox(10, lambda: full.append(True))
    outbox.put(b"12345")
    outbox.put(b"67890")
    assert not full
    outbox.put(b"1")
    assert full == [True]
    assert await outbox.get() == b"12345"
    outbox.put(b"1")
    assert full == [True]


def test_an_update_reaches_every_engine(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    for lease in ("r0", "t0"):
        served_plane.connect(lambda prompt, seed: planes.say(renderer, "x"), lease=lease)
    answer = served_plane.post("/runs/run/weights", {"version": 1, "uri": "w1"})
    assert answer["engines"] == {"r0": 1, "t0": 1}
    assert [engine["version"] for engine in served_plane.live_engines()] == [1, 1]
    assert served_plane.http.post("/runs/run/weights", json={"version": 0, "uri": "w0"}).status_code == 409


def test_what_the_engine_raises_ends_the_lease(
    served_plane: planes.ServedPlane, drive: Callable[[ScriptedEngine], Engine]
) -> None:
    served_plane.register()

    class Broken(ScriptedEngine):
        def step(self) -> list[Chunk]:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        serve_engine(served_plane.url, served_plane.key, HELLO, drive(Broken(lambda prompt, seed: [1])))
    bench.waits.wait_until(lambda: served_plane.get("/runs/run")["engines"] == [])


class Recorded:
    """Timeline that keeps the spans that a driver records."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float, int | None, int]] = []
        self.num_flushes = 0

    def add(
        self, kind: str, label: str, start: float, end: float, *, version: int | None = None, tokens: int = 0
    ) -> None:
        self.spans.append((kind, label, start, end, version, tokens))

    def flush(self) -> None:
        self.num_flushes += 1


def test_steps_close_together_are_one_span_of_work_and_the_first_ends_with_the_first_token() -> None:
    recorded = Recorded()
    spans = Spans(recorded)
    for start, tokens in ((1.0, 0), (1.01, 2), (1.04, 3), (1.06, 3), (2.0, 1)):
        spans.add_work(start, start + 0.01, 0, tokens)
    spans.end_work()
    assert [span[2:] for span in recorded.spans] == [
        (1.0, 1.02, 0, 2),
        (1.04, 1.07, 0, 6),
        (2.0, 2.01, 0, 1),
    ]


def test_a_span_of_work_ends_with_its_version_and_is_told_of_before_long() -> None:
    recorded = Recorded()
    spans = Spans(recorded)
    for tick in range(800):
        spans.add_work(tick / 100, (tick + 1) / 100, tick // 200, 1)
    spans.end_work()
    assert [span[4] for span in recorded.spans] == [0, 0, 1, 2, 3]
    assert max(end - start for _, _, start, end, _, _ in recorded.spans) <= MAX_SPAN_S + 0.01
    assert sum(span[5] for span in recorded.spans) == 800


def test_what_an_aborted_request_had_sampled_and_not_reported_counts_as_sampled() -> None:
    recorded = Recorded()
    spans = Spans(recorded)
    spans.add_work(time.time(), time.time(), 3, 2)
    spans.add_late_tokens(5, 3)
    spans.add_late_tokens(0, 3)
    spans.end_work()
    assert [(label, version, tokens) for _, label, _, _, version, tokens in recorded.spans] == [
        ("sample", 3, 2),
        ("sample", 3, 5),
    ]


def test_loading_sampling_waiting_and_yielding_are_told_apart(
    served_plane: planes.ServedPlane, renderer: Renderer, drive: Callable[[ScriptedEngine], Engine]
) -> None:
    served_plane.register()
    recorded = Recorded()

    engine = drive(ScriptedEngine(lambda prompt, seed: planes.say(renderer, "x")))
    thread = threading.Thread(
        target=serve_engine, args=(served_plane.url, served_plane.key, HELLO, engine, recorded)
    )
    thread.start()
    bench.waits.wait_until(lambda: bool(served_plane.live_engines()))
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    served_plane.post("/v1/chat/completions", body)
    served_plane.post("/runs/run/weights", {"version": 1, "uri": "w1"})
    time.sleep(2 * BUSY_GAP_S)
    served_plane.post("/runs/run/leases/r0/revoke")
    bench.waits.join(thread)
    told = [(kind, label, version) for kind, label, _, _, version, _ in recorded.spans if kind != "wait"]
    assert told[0] == ("moving", "load engine", 0)
    assert told[-2:] == [("moving", "load weights", 1), ("moving", "yield", 1)]
    assert set(told[1:-2]) == {("busy", "sample", 0)}
    assert {label for kind, label, *_ in recorded.spans if kind == "wait"} == {"requests"}
    assert recorded.num_flushes == 1
    assert all(start <= end for _, _, start, end, _, _ in recorded.spans)


class Losing(ScriptedEngine):
    """An engine that is lost when it has sampled two tokens, once."""

    num_starts = 0

    def update_weights(self, weights: WeightsRef) -> None:
        self.num_starts += 1
        super().update_weights(weights)

    def step(self) -> list[Chunk]:
        chunks = super().step()
        if self.num_starts == 1 and any(chunk.token_ids for chunk in chunks):
            self.rest()
            raise EngineLostError("killed")
        return chunks


def test_a_lost_engine_is_made_again_and_its_requests_go_on(
    served_plane: planes.ServedPlane, renderer: Renderer, drive: Callable[[ScriptedEngine], Engine]
) -> None:
    served_plane.register()
    engine = Losing(lambda prompt, seed: planes.say(renderer, "still here"))
    thread = threading.Thread(
        target=serve_engine, args=(served_plane.url, served_plane.key, HELLO, drive(engine))
    )
    thread.start()
    bench.waits.wait_until(lambda: bool(served_plane.live_engines()))
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    answer = served_plane.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == "still here"
    assert engine.num_starts == 2
    served_plane.post("/runs/run/release")
    bench.waits.join(thread)


class Picky(ScriptedEngine):
    """An engine that refuses version 1."""

    refused = False

    def update_weights(self, weights: WeightsRef) -> None:
        self.refused = weights.version == 1
        if not self.refused:
            super().update_weights(weights)

    def step(self) -> list[Chunk]:
        refused = self.refused
        self.refused = False
        if refused:
            raise WeightsRefusedError("w1/model.safetensors: cut off")
        return super().step()


def test_an_engine_that_refuses_weights_serves_on_and_is_not_waited_for(
    served_plane: planes.ServedPlane,
    renderer: Renderer,
    caplog: pytest.LogCaptureFixture,
    drive: Callable[[ScriptedEngine], Engine],
) -> None:
    served_plane.register()
    engine = drive(Picky(lambda prompt, seed: planes.say(renderer, "x")))
    thread = threading.Thread(target=serve_engine, args=(served_plane.url, served_plane.key, HELLO, engine))
    thread.start()
    bench.waits.wait_until(lambda: bool(served_plane.live_engines()))
    published = served_plane.post("/runs/run/weights", {"version": 1, "uri": "w1"})
    told = "because it refuses version 1: w1/model.safetensors: cut off"
    assert published["engines"] == {"r0": 0}
    assert published["refusals"] == [f"engine r0 still uses version 0, {told}"]
    assert "engine r0 refuses version 1: w1/model.safetensors: cut off" in caplog.text
    # a run that cannot go on without version 1 says it when it ends
    assert told in served_plane.get("/runs/run")["waiting_for"]
    published = served_plane.post("/runs/run/weights", {"version": 2, "uri": "w2"})
    assert (published["engines"], published["refusals"]) == ({"r0": 2}, [])
    assert "refuses" not in served_plane.get("/runs/run")["waiting_for"]
    served_plane.post("/runs/run/release")
    bench.waits.join(thread)


class Fetching(ScriptedEngine):
    """An engine whose weights never come."""

    rested = 0

    def update_weights(self, weights: WeightsRef) -> None: ...

    def rest(self) -> None:
        self.rested += 1
        super().rest()


def test_an_engine_yields_while_its_weights_are_on_their_way(
    served_plane: planes.ServedPlane, drive: Callable[[ScriptedEngine], Engine]
) -> None:
    served_plane.register()
    recorded = Recorded()
    engine = Fetching(lambda prompt, seed: [1])
    reasons: list[str] = []
    thread = threading.Thread(
        target=lambda: reasons.append(
            serve_engine(served_plane.url, served_plane.key, HELLO, drive(engine), recorded)
        )
    )
    thread.start()
    bench.waits.wait_until(lambda: bool(served_plane.get("/runs/run")["engines"]))
    assert served_plane.post("/runs/run/leases/r0/revoke", {"within_s": 5}) == {"engines": 1, "dropped": 0}
    bench.waits.join(thread)
    assert reasons == ["revoked"] and engine.rested
    assert [label for _, label, *_ in recorded.spans] == ["load engine", "yield"]
