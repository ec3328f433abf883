"""The gateway benchmark's load is complete and correct, and errors are not counted as figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import gateway_client, gateway_floor, gateway_peers
from benchmarks.emulation.engine import EmulatedEngine
from benchmarks.gateway import Sizes, compare, measure_ours
from benchmarks.gateway_client import Load, Measured, Target, answer_text, measure, streamed_content
from benchmarks.gateway_lives import interruptions, journal
from benchmarks.gateway_stand import gateway
from benchmarks.gateway_streams import DIALECTS, stream_all
from sf_core.cli.stack.local import local_stack
from sf_core.cli.stack.supervisor import StackError
from sf_core.models.builtin import make_tokenizer
from sf_core.testing.engines import awake
from sf_core.types import GenerationRequest, Sampling, WeightsRef
from tests.bench.dataplane.planes import serving

WINDOW_S = 3.0
"""Seconds of each load; sessions begin in its first quarter of a second, and a busy machine holds them up."""


@pytest.fixture(autouse=True)
def _no_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_client, "WARMUP_S", 0.0)


async def load_floor(path: str, load: Load, app: Any = gateway_floor.app) -> Measured:
    with serving(app) as url:
        host, port = url.removeprefix("http://").split(":")
        return await measure(Target((host, int(port)), "m", [path]), load, WINDOW_S / 3)


def test_the_text_the_client_expects_is_that_of_the_emulated_tokens() -> None:
    engine = EmulatedEngine(0.0)
    awake(engine, WeightsRef(0, ""))
    engine.submit(GenerationRequest("r", [1], 0, 100, (), Sampling()))
    [chunk] = engine.step()
    assert make_tokenizer().decode(chunk.token_ids) == answer_text(100)


async def test_a_turn_takes_at_least_its_tokens_delay() -> None:
    measured = await load_floor("/2/v1/chat/completions", Load(4, max_tokens=20, turns=3))
    assert measured.num_errors == 0
    assert measured.num_done > 0
    # the loop's timers count whole milliseconds
    assert min(measured.latencies_s) >= 0.038


async def test_sessions_send_their_whole_history_and_ask_for_log_probs() -> None:
    asked: list[dict[str, Any]] = []

    async def recording(scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def keep() -> Any:
            event = await receive()
            asked.append(orjson.loads(event["body"]))
            return event

        await gateway_floor.app(scope, keep, send)

    load = Load(1, max_tokens=3, turns=2, prompt_tokens=30, logprobs=True)
    await load_floor("/1/v1/chat/completions", load, recording)
    first, second = asked[:2]
    assert [len(first["messages"]), len(second["messages"])] == [1, 3]
    assert len(first["messages"][0]["content"]) == 30
    assert second["messages"][1]["content"] == answer_text(3)
    assert first["logprobs"] is True


async def test_wrong_answers_and_refusals_are_errors_and_no_figures() -> None:
    async def wrong(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        body = gateway_floor.whole_answer("m", 2, False)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    measured = await load_floor("/0/v1/chat/completions", Load(1, max_tokens=3), wrong)
    assert measured.num_errors > 0
    assert measured.latencies_s == []
    assert measured.first_error.startswith("expected the text of 3 tokens")


def test_a_stream_is_read_across_its_chunks() -> None:
    event = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n'
    body = b"30\r\n" + event % b"ab" + b"\r\n30\r\n" + event % b"c" + b"\r\n0\r\n\r\n"
    assert streamed_content(body) == "abc"


def test_a_peer_that_does_not_start_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> list[str]:
        raise StackError("no such package")

    monkeypatch.setitem(gateway_peers.PEERS, "broken", broken)
    with local_stack(tmp_path / "logs") as stack:
        sizes = Sizes(4, WINDOW_S, 0, 0, 0, 0, 0)
        line = compare(stack, tmp_path, sizes, ["throughput"], ["broken"])
    assert line["broken_left_out"] == "no such package"
    assert line["floor_requests_per_second"] > 0


async def test_the_journal_section_reads_back_what_it_wrote(tmp_path: Path) -> None:
    assert (await journal(tmp_path, turns=70))["recovery_tokens_read"] == 70 * 200


@pytest.mark.system
def test_a_load_on_our_data_plane_has_no_errors(tmp_path: Path) -> None:
    with local_stack(tmp_path / "logs") as stack:
        line = measure_ours("throughput")(stack, tmp_path, Sizes(4, WINDOW_S, 0, 0, 0, 0, 0))
    assert [name for name in line if "error" in name] == []
    assert line["requests_per_second"] > 0
    assert line["throughput_cpu_ms_per_request"] > 0


@pytest.mark.system
async def test_interrupted_streams_lose_and_repeat_nothing(tmp_path: Path) -> None:
    with local_stack(tmp_path / "logs") as stack, gateway(stack, tmp_path) as ours:
        line = await interruptions(ours, num_streams=4)
    assert (line["tokens_lost"], line["tokens_repeated"], line["answers_wrong"]) == (0, 0, 0)


@pytest.mark.system
async def test_streams_of_every_dialect_are_read_whole(tmp_path: Path) -> None:
    with local_stack(tmp_path / "logs") as stack, gateway(stack, tmp_path) as ours:
        line = await stream_all(ours, count=4, num_tokens=30, step_ms=10.0)
    for name in DIALECTS:
        prefix = "stream" if name == "chat" else f"stream_{name}"
        assert line[f"{prefix}_answers_wrong"] == 0
        assert line[f"{prefix}_tokens_per_core_second"] > 0
        assert 0 < line[f"{prefix}_events_per_token"] <= 1
