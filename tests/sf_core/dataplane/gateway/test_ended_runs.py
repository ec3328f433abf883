"""Requests without a session for the model of a run that has ended: nobody waits for an engine of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.patience import join, patience, wait_until
from tests.sf_core.dataplane.stand import Server, answering

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


def ask(server: Server, dialect: str) -> httpx.Response:
    path, body, _, _ = QUESTIONS[dialect]
    return httpx.post(server.url + path, json={"model": "policy"} | body, timeout=patience())


def end(server: Server) -> None:
    server.post("/runs/run/weights", {"version": 1, "uri": "w"})
    server.post("/runs/run/release")


def check_told(refused: httpx.Response, dialect: str) -> None:
    _, _, read, expected = QUESTIONS[dialect]
    assert refused.status_code == 503, refused.text
    assert read(refused.json()) == expected
    assert refused.json()["error"]["message"] == COMPLETE


@pytest.mark.parametrize("dialect", QUESTIONS)
def test_a_request_to_a_run_that_has_ended_is_told_so_in_its_dialect(server: Server, dialect: str) -> None:
    server.register(num_batches=1)
    end(server)
    refused = ask(server, dialect)
    check_told(refused, dialect)
    assert "retry-after" not in refused.headers


@pytest.mark.parametrize("dialect", QUESTIONS)
def test_a_request_that_waits_while_its_run_ends_is_told_the_same(server: Server, dialect: str) -> None:
    server.register(num_batches=1)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(server, dialect)))
    waiting.start()
    wait_until(lambda: server.get("/runs/run")["requests_waiting"] == 1)
    end(server)
    join(waiting)
    check_told(answers[0], dialect)


def test_a_request_that_an_engine_works_on_while_its_run_ends_is_told_the_same(
    server: Server, renderer: Renderer
) -> None:
    server.register(num_batches=1)
    server.connect(answering(renderer, "hello"))
    server.engines["r0"].steps_left = 0
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(server, "chat")))
    waiting.start()
    wait_until(lambda: server.engines["r0"].asked)
    server.post("/runs/run/release")
    join(waiting)
    assert answers[0].status_code == 503
    join(server.threads[0])
    assert server.reasons == {"r0": "released"}


def test_a_run_that_is_taken_up_again_answers_again(server: Server, renderer: Renderer) -> None:
    server.register()
    server.post("/runs/run/release")
    refused = ask(server, "chat")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "no flow works on it until one is started again" in refused.json()["error"]["message"]
    server.register(attempt=2)
    server.connect(answering(renderer, "hello"), attempt=2)
    assert ask(server, "chat").json()["choices"][0]["message"]["content"] == "hello"
