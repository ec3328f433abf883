"""The scripted policy, as the packages of agents hear it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.cli.rehearsal.scripted_policy import MOST_ANSWERS, ScriptedPolicy
from sf_core.config import RunConfig
from sf_core.types import Endpoint
from tests.bench.dataplane import clients
from tests.bench.properties import examples
from tests.bench.waits import patience


def each(client: clients.Client) -> str:
    return client.dialect.name


def signed(library: Any, key: str) -> Any:
    """A client of this HTTP library that shows the key."""

    def sign(request: Any) -> None:
        request.headers["x-api-key"] = key

    return library.Client(event_hooks={"request": [sign]}, timeout=patience())


def at(client: clients.Client, endpoint: Endpoint) -> Any:
    """The client's package, pointed to the endpoint."""
    http = signed(client.http, endpoint.api_key)
    return client.agent(endpoint.base_url.removesuffix("/v1"), http)


@pytest.mark.parametrize("client", clients.CLIENTS, ids=each)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_client_hears_the_answer(client: clients.Client, streamed: bool) -> None:
    policy = ScriptedPolicy(RunConfig(), "the answer")
    with policy.serve() as endpoint, at(client, endpoint) as agent:
        assert [heard.text for heard in client.ask(agent, streamed, client.request)] == ["the answer"]
    assert policy.num_answers == 1


@settings(max_examples=examples(10), deadline=None)
@given(answer=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), number=st.integers(1, 3))
def test_any_text_is_heard_as_it_is(answer: str, number: int) -> None:
    [client] = [client for client in clients.CLIENTS if client.dialect.name == "chat"]
    policy = ScriptedPolicy(RunConfig(), answer)
    with policy.serve() as endpoint, at(client, endpoint) as agent:
        for streamed in (False, True):
            heard = client.ask(agent, streamed, client.request | {"n": number})
            assert [one.text for one in heard] == [answer] * number


def test_what_a_data_plane_refuses_is_refused_in_its_words() -> None:
    policy = ScriptedPolicy(RunConfig(), "yes")
    asked = {"model": "policy", "messages": []}
    with policy.serve() as endpoint:
        url = f"{endpoint.base_url}/chat/completions"
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        with httpx.Client(headers=key, timeout=patience()) as http:
            wrong = http.post(url, json=asked)
            undone = http.post(url, json=asked | {"logit_bias": {"1": 2}})
            assert http.get(f"{endpoint.base_url}/models").json()["data"][0]["id"] == endpoint.model
        strange = httpx.post(url, json=asked, timeout=patience())
    assert [answer.status_code for answer in (wrong, undone, strange)] == [400, 400, 401]
    assert wrong.json()["error"]["message"] == "messages must contain at least one message"
    assert undone.json()["error"]["message"].startswith("logit_bias is not supported")
    assert policy.num_answers == 0


def test_an_agent_that_asks_on_is_refused_at_last() -> None:
    policy = ScriptedPolicy(RunConfig(), "again")
    asked = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
    with policy.serve() as endpoint:
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        with httpx.Client(headers=key, timeout=patience()) as http:
            answers = [
                http.post(f"{endpoint.base_url}/chat/completions", json=asked)
                for _ in range(MOST_ANSWERS + 1)
            ]
    assert [answer.status_code for answer in answers] == [200] * MOST_ANSWERS + [429]
    assert answers[-1].headers["x-should-retry"] == "false"
