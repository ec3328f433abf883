"""What a teacher at a URL says, by a real server; and servers that fail, by small ones of our own."""

from __future__ import annotations

import http.server
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from sf_core.engines.protocol import Engine
from sf_core.engines.vllm.teacher import CONCURRENCY, ask_teacher
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake
from tests.bench.refusals import check_sentence
from tests.bench.waits import patience
from tests.sf_core.engines.vllm import small_policies


@pytest.fixture
def teacher_url(engine: Engine, tied: small_policies.Policies, as_tcp: Callable[[str], str]) -> Iterator[str]:
    """A real server with the tied policy, version 0."""
    driven = DrivenEngine(engine)
    awake(driven, tied.ref(0))
    url = as_tcp(small_policies.own_socket())
    # an engine that nobody steps is paused
    httpx.post(f"{url}/resume", timeout=patience()).raise_for_status()
    yield url
    driven.rest()


@pytest.mark.system
def test_a_server_says_of_every_token_what_the_model_says(
    teacher_url: str, tied: small_policies.Policies
) -> None:
    draw = random.Random(7)
    rows = [[draw.randrange(60) for _ in range(draw.randrange(2, 60))] for _ in range(CONCURRENCY + 8)]
    # the longest that it takes: it samples one token behind them
    rows.append([draw.randrange(60) for _ in range(small_policies.CONTEXT - 1)])
    told = ask_teacher(f"{teacher_url}/", [(f"row {i}", ids) for i, ids in enumerate(rows)], patience())
    assert len(told) == len(rows)
    for ids, said in zip(rows, told, strict=True):
        expected = tied.logits(0, ids).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        assert said.dtype == np.float32 and len(said) == len(ids) and said[0] == 0
        assert np.abs(said[1:] - expected.numpy()).max() < 1e-4
    assert len(small_policies.servers()) > 0


@pytest.mark.system
def test_a_row_that_is_too_long_for_the_server_is_named(teacher_url: str) -> None:
    length = small_policies.CONTEXT
    with pytest.raises(ValueError) as refused:
        ask_teacher(teacher_url, [("row 0", [1, 2]), ("row 1", [5] * length)], patience())
    says = f"row 1 has {length} tokens, but the teacher at {teacher_url} takes at most {length - 1}: "
    check_sentence(str(refused.value), says, f"start the teacher with --max-model-len={length + 1}")


class Faulty:
    """Answers each request by the next of `answers`, (status, body), and then rightly."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.keys: set[str | None] = set()
        self.url = ""
        self.logprob: float | None = -0.5
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any] | None, key: str | None) -> tuple[int, bytes]:
        with self.lock:
            self.keys.add(key)
            if self.answers:
                return self.answers.pop(0)
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "large"}, {"id": "other"}]}'
        assert body is not None and path == "/v1/completions"
        asked = {"model": "large", "prompt_logprobs": 0, "max_tokens": 1, "temperature": 1}
        assert {name: body[name] for name in asked} == asked
        told = [None, *({str(token): {"logprob": self.logprob}} for token in body["prompt"][1:])]
        return 200, json.dumps({"choices": [{"prompt_logprobs": told}]}).encode()


@contextmanager
def serving(faulty: Faulty, port: int = 0) -> Iterator[Faulty]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            status, answer = faulty.answer(self.path, body, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        faulty.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield faulty
        server.shutdown()


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    with serving(Faulty()) as made:
        yield made


ROWS = [(f"row {number}", [number, 5, 6]) for number in range(3)]


def ask(faulty: Faulty, timeout_s: float | None = None) -> list[list[float]]:
    return [said.tolist() for said in ask_teacher(faulty.url, ROWS, timeout_s or patience())]


def test_a_server_that_fails_for_some_time_is_asked_again(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sf_core.engines.vllm.teacher._RETRY_DELAY_S", 0.01)
    faulty.answers = [(503, b""), (500, b"{}"), (429, b"too many"), (408, b"")]
    assert ask(faulty) == [[0.0, -0.5, -0.5]] * 3
    assert faulty.answers == [] and faulty.keys == {None}


def test_a_server_that_is_gone_and_comes_back_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sf_core.engines.vllm.teacher._RETRY_DELAY_S", 0.01)
    with serving(Faulty()) as gone:
        port = int(gone.url.rpartition(":")[2])
    back: list[Any] = []
    asking = threading.Thread(target=lambda: back.extend(ask(gone)))
    asking.start()
    asking.join(0.2)
    assert asking.is_alive()
    with serving(gone, port):
        asking.join(patience())
    assert back == [[0.0, -0.5, -0.5]] * 3


def test_a_server_that_stays_away_ends_the_wait_with_the_reason(faulty: Faulty) -> None:
    faulty.answers = [(503, b'{"error": {"message": "still loading"}}')] * 100
    with pytest.raises(TimeoutError, match=r"3 rows from the teacher at http.* 503 still loading"):
        ask(faulty, timeout_s=0.05)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((401, b""), "rejected the key: set SF_TEACHER_KEY to the server's API key"),
        ((404, b"Not Found"), "refuses the request for its models: /v1/models: 404 Not Found"),
        ((400, b'{"error": {"message": "too long"}}'), "refuses row "),
    ],
)
def test_what_the_server_refuses_is_not_asked_again(
    faulty: Faulty, answer: tuple[int, bytes], sentence: str
) -> None:
    listed = (200, b'{"data": [{"id": "large"}]}')
    faulty.answers = [listed, answer] if answer[0] == 400 else [answer]
    with pytest.raises(ValueError) as refused:
        ask(faulty)
    check_sentence(str(refused.value), faulty.url, sentence)


@pytest.mark.parametrize(("told", "said"), [(-9999.0, "minus infinity"), (None, "None")], ids=str)
def test_a_number_that_is_not_finite_names_row_and_token(
    faulty: Faulty, told: float | None, said: str
) -> None:
    faulty.logprob = told
    with pytest.raises(ValueError) as refused:
        ask(faulty)
    check_sentence(str(refused.value), "reports for row ", f" that the log-prob of token 1 is {said}, ")


def test_the_key_comes_from_the_environment(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SF_TEACHER_KEY", "mine")
    ask(faulty)
    assert faulty.keys == {"Bearer mine"}
