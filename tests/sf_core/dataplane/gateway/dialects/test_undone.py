"""Every dialect refuses unsupported fields that would change an answer, except values that change nothing and
fields that the run ignores."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sf_core.config import RunConfig
from sf_core.config.undone import UNDONE
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import refuse_undone
from tests.sf_core.dataplane.stand import Server, answering

HI = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
}
DIALECTS = pytest.mark.parametrize("path", REQUESTS)


def ask(server: Server, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {"model": "policy"} | REQUESTS[path] | fields
    response = httpx.post(server.url + path, json=body)
    return response.status_code, response.json()


@DIALECTS
def test_a_field_that_is_not_done_is_refused_in_the_dialects_own_form(server: Server, path: str) -> None:
    server.register()
    status, answer = ask(server, path, {"presence_penalty": 0.5})
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == (
        "presence_penalty is not supported and would change the answer: leave it out, or make it 0, or name "
        "it in the run's rollout.ignored_fields to have it ignored."
    )
    assert (answer.get("type") == "error") == (path == "/v1/messages")
    assert error.get("param") == (None if path == "/v1/messages" else "presence_penalty")


@DIALECTS
def test_values_that_change_nothing_pass(server: Server, renderer: Renderer, path: str) -> None:
    server.register()
    server.connect(answering(renderer, "the sum is 42."))
    neutral = {name: values[0] if values else None for name, values in UNDONE.items()}
    assert ask(server, path, neutral)[0] == 200
    assert ask(server, path, dict.fromkeys(UNDONE))[0] == 200


@DIALECTS
def test_a_run_may_ignore_some_of_them(server: Server, renderer: Renderer, path: str) -> None:
    server.register(ignored_fields=["logit_bias", "min_p"])
    server.connect(answering(renderer, "the sum is 42."))
    assert ask(server, path, {"logit_bias": {"3": 100}, "min_p": 0.1})[0] == 200
    status, answer = ask(server, path, {"logit_bias": {"3": 100}, "min_tokens": 3})
    assert (status, answer["error"]["message"].split()[0]) == (400, "min_tokens")


@pytest.mark.parametrize("name", UNDONE)
def test_every_field_of_the_list_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(
        ApiError, match=f"^{name} is not supported and would change the answer: .*\\.$"
    ) as error:
        refuse_undone({name: "something else"})
    assert error.value.status == 400
    refuse_undone({name: "something else"}, [name])


def test_tokens_are_counted_by_the_same_list(server: Server) -> None:
    server.register()
    body = {"model": "policy", "messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    response = httpx.post(server.url + "/v1/messages/count_tokens", json=body)
    assert response.status_code == 400 and "chat_template_kwargs" in response.json()["error"]["message"]


def test_only_fields_of_the_list_can_be_ignored() -> None:
    config = RunConfig.model_validate({"rollout": {"ignored_fields": ["min_p"]}})
    assert json.loads(config.model_dump_json())["rollout"]["ignored_fields"] == ["min_p"]
    for name, near in (("messages", "presence_penalty"), ("minp", "min_p")):
        with pytest.raises(ValueError, match=f"'{name}' is none of the fields that are refused, as .*{near}"):
            RunConfig.model_validate({"rollout": {"ignored_fields": [name]}})
