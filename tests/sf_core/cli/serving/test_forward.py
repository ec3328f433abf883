"""The requests that `sf try` passes on to an endpoint elsewhere, with the key of that endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from sf_core.cli.serving.conversation import Printer
from sf_core.cli.serving.forward import Forward
from sf_core.cli.serving.local_plane import serve_app
from tests.bench.canned_model import CannedModel
from tests.patience import patience

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def forward(canned_model: CannedModel) -> Iterator[tuple[str, Forward]]:
    canned_model.answers += [{"content": "hello"}] * 9
    endpoint = canned_model.endpoint
    forward = Forward(endpoint.base_url, endpoint.api_key, Printer(Console(quiet=True)))
    with serve_app(forward) as url:
        yield url, forward


def send(url: str, **sent: Any) -> int:
    return httpx.post(f"{url}/v1/chat/completions", json=HI, timeout=patience(), **sent).status_code


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {"headers": {"authorization": "Bearer try"}},
        {"headers": {"authorization": "Bearer key"}},
        {"params": {"key": "key"}},
        {"headers": {"content-type": "text/plain", "origin": "http://evil.test"}},
    ],
)
def test_nobody_but_the_agent_uses_the_key_of_the_endpoint(
    forward: tuple[str, Forward], canned_model: CannedModel, strange: dict[str, Any]
) -> None:
    url, _ = forward
    assert send(url, **strange) == 401
    assert canned_model.requests == []


@pytest.mark.parametrize("where", ["authorization", "x-api-key", "x-goog-api-key", "key"])
def test_the_agent_sends_its_key_as_its_api_does(
    forward: tuple[str, Forward], canned_model: CannedModel, where: str
) -> None:
    url, forwarding = forward
    value = f"Bearer {forwarding.agents_key}" if where == "authorization" else forwarding.agents_key
    assert send(url, **{"params" if where == "key" else "headers": {where: value}}) == 200
    assert canned_model.requests == [HI]
