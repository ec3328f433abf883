"""An answer interrupted anywhere is the answer without interruptions: text, log-probs, usage, plain and
streamed, with what falls across the seam - a stop string, a character, the end of the budget."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench import waits
from tests.bench.dataplane import planes
from tests.bench.properties import examples

TEXT = "naïve 数学 <STOP> übergröße 楽しい"

OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop": ["<STOP>"]},
    {"stop": ["学 <STOP> ü"]},
    {"max_tokens": 9},
    {"max_tokens": 9, "stop": ["<STOP>"]},
]


class Interrupter:
    """Two engines that take over requests from each other."""

    def __init__(self, plane: planes.ServedPlane, renderer: Renderer) -> None:
        self.plane = plane
        answer = planes.say(renderer, TEXT)
        plane.register()
        for name in ("a", "b"):
            plane.connect(lambda prompt, seed: answer, lease=name)
        self.num_tokens = len(answer)

    def ask(self, cuts: list[int], options: dict[str, Any], streamed: bool) -> tuple[dict[str, Any], int]:
        """Answer to a request that moves after each number of steps in `cuts`, and number of moves."""
        names = itertools.cycle(["a", "b"])
        now = next(names)
        other = next(names)
        self.pause(other)
        self.hold(now, cuts[0] if cuts else None)
        answers: list[dict[str, Any]] = []
        agent = threading.Thread(target=lambda: answers.append(self.answer(options, streamed)))
        agent.start()
        num_moves = 0
        for cut in cuts[1:] + [None] if cuts else []:
            waits.wait_until(lambda now=now: self.holds(now) or not agent.is_alive())  # type: ignore[misc]
            self.hold(other, cut)
            self.resume(other)
            num_moves += agent.is_alive()
            self.pause(now)
            now, other = other, now
        waits.join(agent)
        self.resume(other)
        return answers[0], num_moves

    def hold(self, name: str, num_steps: int | None) -> None:
        self.plane.engines[name].steps_left = num_steps

    def holds(self, name: str) -> bool:
        engine = self.plane.engines[name]
        return engine.steps_left == 0 and engine.num_requests > 0

    def pause(self, name: str) -> None:
        self.plane.post("/runs/run/pause", {"mode": "evacuate", "engine": name})

    def resume(self, name: str) -> None:
        self.plane.post("/runs/run/resume", {"engine": name})

    def answer(self, options: dict[str, Any], streamed: bool) -> dict[str, Any]:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        body |= options | {"seed": 1}
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        response = httpx.post(f"{self.plane.url}/v1/chat/completions", json=body, timeout=waits.patience())
        assert response.status_code == 200, response.text
        return _streamed(response.text) if streamed else _whole(response.json())


def _whole(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    return {
        "text": choice["message"]["content"],
        "logprobs": choice["logprobs"]["content"],
        "reason": choice["finish_reason"],
        "usage": answer["usage"],
    }


def _streamed(text: str) -> dict[str, Any]:
    events = [orjson.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "logprobs": [one for choice in choices for one in (choice.get("logprobs") or {}).get("content", [])],
        "reason": choices[-1]["finish_reason"],
        "usage": events[-1]["usage"],
    }


@pytest.fixture(scope="module")
def interrupter(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, renderer: Renderer
) -> Iterator[Interrupter]:
    with planes.running_app() as url, planes.operator_client(url) as http:
        plane = planes.ServedPlane(url, http, Path(tmp_path_factory.mktemp("runs")), model_dir)
        yield Interrupter(plane, renderer)
        plane.post("/runs/run/release")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_answer_cut_at_any_token_is_the_same(
    interrupter: Interrupter, options: dict[str, Any], streamed: bool
) -> None:
    undisturbed, _ = interrupter.ask([], options, streamed)
    for cut in range(undisturbed["usage"]["completion_tokens"]):
        answer, num_moves = interrupter.ask([cut], options, streamed)
        assert answer == undisturbed
        assert num_moves == 1


@settings(
    max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cuts=st.lists(st.integers(0, 6), min_size=2, max_size=5),
    options=st.sampled_from(OPTIONS),
    streamed=st.booleans(),
)
def test_an_answer_cut_several_times_is_the_same(
    interrupter: Interrupter, cuts: list[int], options: dict[str, Any], streamed: bool
) -> None:
    assert interrupter.ask(cuts, options, streamed)[0] == interrupter.ask([], options, streamed)[0]
