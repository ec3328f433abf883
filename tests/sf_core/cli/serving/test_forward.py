"""Requests through `sf try --endpoint`."""

from __future__ import annotations

import io
import time

import certifi
import httpx
import pytest
from rich.console import Console

from sf_core.cli.serving.app_thread import serve_app
from sf_core.cli.serving.conversation import Printer
from sf_core.cli.serving.forward import Forward
from tests.bench.canned_model import CannedModel

REQUESTS = 20


def test_a_request_does_not_read_all_certificate_authorities(
    canned_model: CannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    begun = time.process_time()
    for _ in range(REQUESTS):
        httpx.create_ssl_context()
    contexts_s = time.process_time() - begun
    canned_model.answers = [{"content": "42"}] * (REQUESTS + 1)
    printer = Printer(Console(file=io.StringIO()))
    app = Forward(canned_model.endpoint.base_url, "key", printer)
    headers = {"Authorization": f"Bearer {app.agents_key}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "6 * 7?"}]}
    with serve_app(app) as url, httpx.Client(base_url=url, headers=headers) as http:

        def ask() -> None:
            assert "42" in http.post("/v1/chat/completions", json=body).raise_for_status().text

        ask()
        begun = time.process_time()
        for _ in range(REQUESTS):
            ask()
        spent_s = time.process_time() - begun
    assert spent_s < contexts_s


def test_a_path_that_cannot_be_passed_on_is_answered(canned_model: CannedModel) -> None:
    app = Forward(canned_model.endpoint.base_url, "key", Printer(Console(file=io.StringIO())))
    headers = {"Authorization": f"Bearer {app.agents_key}"}
    with serve_app(app) as url:
        answer = httpx.post(f"{url}/v1/%01", headers=headers, json={})
    assert answer.status_code == 502
    assert "Invalid non-printable ASCII character in URL" in answer.json()["error"]["message"]
