"""Answers that take long, and engines, under the bounds on connections and on requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench import dataplane
from tests.bench.dataplane import planes

TEXT = "the answer is 42."
ASK = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def let_time_pass(url: str) -> None:
    """Returns when the time in which a request must arrive has passed twice."""
    for _ in range(2):
        with dataplane.raw.Raw(url) as raw:
            raw.send(f"GET /healthz HTTP/1.1\r\n{dataplane.raw.LOCAL}".encode())
            assert raw.status() == 408


def pieces_of(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line.startswith("data: "))


def test_neither_time_nor_newcomers_cut_answers_and_engines(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with (
        planes.running_app(request_timeout_s=0.2, max_connections=20) as url,
        planes.attended(url, tmp_path, model_dir) as plane,
        contextlib.ExitStack() as stack,
    ):
        plane.register()
        plane.connect(planes.answering(renderer, TEXT))
        engine = plane.engines["r0"]
        engine.steps_left = 3
        # one shows the key, the other is welcome without one
        streams = [
            pieces_of(
                stack.enter_context(http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}))
            )
            for http in (plane.http, plane.client.http)
        ]
        for stream in streams:
            assert next(stream)
        newcomers = [stack.enter_context(dataplane.raw.Raw(url)) for _ in range(60)]
        assert newcomers[0].wait_for_end() == b""
        let_time_pass(url)
        engine.steps_left = None
        for stream in streams:
            assert list(stream)[-1] == "data: [DONE]"
        assert plane.http.post("/v1/chat/completions", json=ASK).status_code == 200
        assert [one["id"] for one in plane.live_engines()] == ["r0"]
        assert plane.reasons == {}
