import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sf_core.agents.tool_loop import _http_client, run_tool_loop
from sf_core.environments.calculator import CALCULATOR
from sf_core.types import Endpoint


class Model:
    """An OpenAI-compatible server that gives prepared answers and keeps the requests."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                model.requests.append(json.loads(body))
                message = {"role": "assistant", "content": None, **model.answers.pop(0)}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(completion | {"choices": [choice]}).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.server.server_port}/v1", "key", "policy")


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    threading.Thread(target=model.server.serve_forever, args=(0.01,), daemon=True).start()
    yield model
    model.server.shutdown()
    model.server.server_close()


def call(arguments: str, name: str = "calc") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def ask(model: Model, *answers: dict[str, Any], max_turns: int = 4) -> str:
    model.answers = list(answers)
    return asyncio.run(run_tool_loop(model.endpoint, "What is 47*83?", [CALCULATOR], max_turns))


def test_a_plain_answer_is_returned(model: Model) -> None:
    assert ask(model, {"content": "3901"}) == "3901"
    assert model.requests[0]["tools"] == [CALCULATOR.schema]


def test_the_result_of_a_called_tool_is_sent_back(model: Model) -> None:
    assert ask(model, call('{"expression": "47*83"}'), {"content": "It is 3901"}) == "It is 3901"
    user, assistant, tool = model.requests[1]["messages"]
    assert user == {"role": "user", "content": "What is 47*83?"}
    assert assistant["tool_calls"][0]["function"]["name"] == "calc"
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "3901"}


@pytest.mark.parametrize(
    "wrong", [call("not json"), call("{}"), call('{"expression": "x"}'), call("{}", name="no_such_tool")]
)
def test_the_model_is_told_what_was_wrong_with_its_call(model: Model, wrong: dict[str, Any]) -> None:
    assert ask(model, wrong, {"content": "sorry"}) == "sorry"
    assert model.requests[1]["messages"][-1]["content"].startswith("error: ")


def test_a_model_that_only_calls_tools_gives_no_answer(model: Model) -> None:
    assert ask(model, *[call('{"expression": "1+1"}')] * 2, max_turns=2) == ""


def test_it_works_again_on_another_event_loop(model: Model) -> None:
    assert [ask(model, {"content": "1"}), ask(model, {"content": "2"})] == ["1", "2"]


def test_connections_are_shared_within_an_event_loop_and_closed_with_it(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    model.answers = [{"content": "1"}, {"content": "2"}]
    clients: list[Any] = []

    async def two_sessions() -> None:
        await asyncio.gather(*(run_tool_loop(model.endpoint, "?") for _ in range(2)))
        clients.extend([await _http_client(), await _http_client()])
        assert not clients[0].is_closed

    asyncio.run(two_sessions())
    assert clients[0] is clients[1] and clients[0].is_closed
    gc.collect()
    assert "Unclosed" not in caplog.text
