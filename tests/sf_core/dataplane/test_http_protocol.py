"""Requests that ask the data plane for another protocol, which RFC 9110 lets a server ignore."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.bench.dataplane import upgrades
from tests.bench.dataplane.planes import ServedPlane
from tests.bench.waits import patience

PATH = "/v1/chat/completions"


@pytest.mark.parametrize("protocol", upgrades.UPGRADES)
def test_a_post_that_asks_for_another_protocol_is_answered_with_its_whole_body(
    answering_plane: ServedPlane, protocol: str
) -> None:
    # more than the server reads at once
    body = json.dumps({**upgrades.QUESTION, "metadata": {"note": "x" * 300_000}}).encode()
    with upgrades.dial(answering_plane.url) as connection:
        for _ in range(2):
            connection.sendall(
                upgrades.encode_request("POST", PATH, body, headers=upgrades.UPGRADES[protocol])
            )
            assert upgrades.read_answer(connection).startswith("answer")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/engines")])
def test_only_a_get_of_the_engines_path_opens_a_websocket(
    served_plane: ServedPlane, method: str, path: str
) -> None:
    with upgrades.dial(served_plane.url) as connection:
        connection.sendall(upgrades.encode_request(method, path, b"{}"))
        expected = upgrades.read_response(connection)
        connection.sendall(
            upgrades.encode_request(method, path, b"{}", headers=upgrades.UPGRADES["websocket"])
        )
        assert upgrades.read_response(connection) == expected
    with served_plane.dial() as engine:
        assert engine.response is not None
        assert engine.response.status_code == 101


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_that_offers_http2_is_answered(answering_plane: ServedPlane) -> None:
    command = [
        "curl",
        "--silent",
        "--http2",
        "--max-time",
        str(patience()),
        "--json",
        json.dumps(upgrades.QUESTION),
    ]
    done = subprocess.run([*command, answering_plane.url + PATH], check=True, capture_output=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"].startswith("answer")
