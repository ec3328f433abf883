"""Requests without a session for the model of a run that has ended: nobody waits for an engine of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench import waits
from tests.bench.dataplane import planes

MESSAGES = [{"role": "user", "content": "0?"}]
COMPLETE = "Run run has ended: all of its 1 iterations are done; `sf serve RUN` serves its policy."

Question = tuple[str, dict[str, Any], Callable[[dict[str, Any]], Any], Any]

QUESTIONS: dict[str, Question] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, lambda e: e["error"]["code"], "run_over"),
    "completions": ("/v1/completions", {"prompt": "0?"}, lambda e: e["error"]["code"], "run_over"),
    "responses": ("/v1/responses", {"input": "0?"}, lambda e: e["error"]["code"], "run_over"),
    "anthropic": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 8},
        lambda e: (e["type"], e["error"]["type"]),
        ("error", "api_error"),
    ),
    "google": (
        "/v1beta/models/policy:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "0?"}]}]},
        lambda e: (e["error"]["code"], e["error"]["status"]),
        (503, "UNAVAILABLE"),
    ),
}
"""Path, body, and what tells the dialect's error apart: how it is read, and what it is."""


def ask(plane: planes.ServedPlane, dialect: str) -> httpx.Response:
    path, body, _, _ = QUESTIONS[dialect]
    return httpx.post(plane.url + path, json={"model": "policy"} | body, timeout=waits.patience())


def end(plane: planes.ServedPlane) -> None:
    plane.post("/runs/run/weights", {"version": 1, "uri": "w"})
    plane.post("/runs/run/release")


def check_told(refused: httpx.Response, dialect: str) -> None:
    _, _, read, expected = QUESTIONS[dialect]
    assert refused.status_code == 503, refused.text
    assert read(refused.json()) == expected
    assert refused.json()["error"]["message"] == COMPLETE


@pytest.mark.parametrize("dialect", QUESTIONS)
def test_a_request_to_a_run_that_has_ended_is_told_so_in_its_dialect(
    served_plane: planes.ServedPlane, dialect: str
) -> None:
    served_plane.register(num_batches=1)
    end(served_plane)
    refused = ask(served_plane, dialect)
    check_told(refused, dialect)
    assert "retry-after" not in refused.headers


@pytest.mark.parametrize("dialect", QUESTIONS)
def test_a_request_that_waits_while_its_run_ends_is_told_the_same(
    served_plane: planes.ServedPlane, dialect: str
) -> None:
    served_plane.register(num_batches=1)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(served_plane, dialect)))
    waiting.start()
    waits.wait_until(lambda: served_plane.get("/runs/run")["requests_waiting"] == 1)
    end(served_plane)
    waits.join(waiting)
    check_told(answers[0], dialect)


def test_a_request_that_an_engine_works_on_while_its_run_ends_is_told_the_same(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(num_batches=1)
    served_plane.connect(planes.answering(renderer, "hello"))
    served_plane.engines["r0"].steps_left = 0
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(served_plane, "chat")))
    waiting.start()
    waits.wait_until(lambda: served_plane.engines["r0"].asked)
    served_plane.post("/runs/run/release")
    waits.join(waiting)
    assert answers[0].status_code == 503
    waits.join(served_plane.threads[0])
    assert served_plane.reasons == {"r0": "released"}


def test_a_run_that_is_taken_up_again_answers_again(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.post("/runs/run/release")
    refused = ask(served_plane, "chat")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "its flow has stopped and can be started again" in refused.json()["error"]["message"]
    served_plane.register(attempt=2)
    served_plane.connect(planes.answering(renderer, "hello"), attempt=2)
    assert ask(served_plane, "chat").json()["choices"][0]["message"]["content"] == "hello"
