"""The control client against a real HTTP server that is only sometimes up."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from sf_core.dataplane.control.client import DataplaneClient, DataplaneError
from tests.bench.proxies import SilentProxy


class Answers(BaseHTTPRequestHandler):
    statuses: list[int]

    def do_GET(self) -> None:
        self.send_response(self.statuses.pop(0))
        body = b'{"error": {"message": "starting"}}'
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing into the output of the tests."""


@pytest.fixture
def answers_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_data_plane_that_is_not_ready_is_asked_again(answers_url: str) -> None:
    Answers.statuses = [503, 503, 200]
    DataplaneClient(answers_url, "run", patience_s=10.0).status()
    assert Answers.statuses == []


def test_patience_ends_with_what_the_data_plane_said(answers_url: str) -> None:
    Answers.statuses = [503] * 1000
    with pytest.raises(DataplaneError, match="starting"):
        DataplaneClient(answers_url, "run", patience_s=0.0).status()


def test_a_data_plane_that_does_not_answer_is_named_with_the_setting_of_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    said = rf"no data plane answers at {url}.* \(dataplane\.url, or SF_DATAPLANE_URL\): .*refused"
    with pytest.raises(httpx.ConnectError, match=said) as raised:
        DataplaneClient(url, "run", patience_s=0.0).status()
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_refusal_is_final(answers_url: str) -> None:
    Answers.statuses = [409, 200]
    with pytest.raises(DataplaneError, match="starting"):
        DataplaneClient(answers_url, "run", patience_s=10.0).status()
    assert Answers.statuses == [200]


def test_no_proxy_stands_between_a_flow_and_its_data_plane(answers_url: str, proxy: SilentProxy) -> None:
    Answers.statuses = [200]
    DataplaneClient(answers_url, "run", patience_s=0.0, timeout_s=20).status()
    assert not proxy.was_asked()


def test_a_refusal_is_told_in_another_process_too() -> None:
    refused = pickle.loads(pickle.dumps(DataplaneError("Attempt 1 of run r was superseded.", 409)))
    assert (str(refused), refused.status) == ("Attempt 1 of run r was superseded.", 409)
