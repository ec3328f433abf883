"""Every dialect refuses unsupported fields that would change an answer, except values that change nothing and
fields that the run ignores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from anthropic.types.thread_unsupported_request_error import ThreadUnsupportedRequestError

from sf_core.config import RunConfig
from sf_core.config.unsupported_fields import UNSUPPORTED_FIELDS
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import refuse_unsupported_fields
from tests.bench.dataplane import planes
from tests.sf_core.dataplane.gateway.dialects import asking


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body; a name with a dot is that of one inside another."""
    body: dict[str, Any] = {}
    for name, value in fields.items():
        outer, _, inner = name.partition(".")
        body |= {outer: {inner: value}} if inner else {outer: value}
    return body


DIALECTS = pytest.mark.parametrize("path", asking.REQUESTS)


@DIALECTS
def test_a_field_that_is_not_done_is_refused_in_the_dialects_own_form(
    served_plane: planes.ServedPlane, path: str
) -> None:
    served_plane.register()
    status, answer = asking.ask(served_plane, path, {"presence_penalty": 0.5})
    error = answer["error"]
    is_google = path.endswith("generateContent")
    kind = error["status"] if is_google else error["type"]
    assert (status, kind) == (400, "INVALID_ARGUMENT" if is_google else "invalid_request_error")
    assert error["message"] == (
        "presence_penalty is not supported and would change the answer: leave it out, or make it 0, or add "
        "it to the run's rollout.ignored_fields."
    )
    assert (answer.get("type") == "error") == (path == "/v1/messages")
    has_param = path != "/v1/messages" and not is_google
    assert error.get("param") == ("presence_penalty" if has_param else None)


@DIALECTS
def test_values_that_change_nothing_pass(
    served_plane: planes.ServedPlane, renderer: Renderer, path: str
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "the sum is 42."))
    neutral = {name: values[0] if values else None for name, values in UNSUPPORTED_FIELDS.items()}
    assert asking.ask(served_plane, path, nested(neutral))[0] == 200
    assert asking.ask(served_plane, path, nested(dict.fromkeys(UNSUPPORTED_FIELDS)))[0] == 200


@DIALECTS
def test_a_run_may_ignore_some_of_them(
    served_plane: planes.ServedPlane, renderer: Renderer, path: str
) -> None:
    served_plane.register(ignored_fields=["logit_bias", "min_p"])
    served_plane.connect(planes.answering(renderer, "the sum is 42."))
    assert asking.ask(served_plane, path, {"logit_bias": {"3": 100}, "min_p": 0.1})[0] == 200
    status, answer = asking.ask(served_plane, path, {"logit_bias": {"3": 100}, "min_tokens": 3})
    assert (status, answer["error"]["message"].split()[0]) == (400, "min_tokens")


@pytest.mark.parametrize("name", UNSUPPORTED_FIELDS)
def test_every_field_of_the_list_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(
        ApiError, match=f"^{name} is not supported and would change the answer: .*\\.$"
    ) as error:
        refuse_unsupported_fields(nested({name: "something else"}))
    assert error.value.status == 400
    outer, _, inner = name.partition(".")
    assert refuse_unsupported_fields(nested({name: "something else"}), [name]) == (
        {outer: {}} if inner else {}
    )


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/chat/completions", "response_format", {"response_format": {"type": "json_object"}}),
        (
            "/v1/chat/completions",
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        ),
        ("/v1/completions", "structured_outputs", {"structured_outputs": {"json": SCHEMA}}),
        (
            "/v1/responses",
            "text.format",
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
        ),
        ("/v1/responses", "text.format", {"text": {"format": {"type": "json_object"}}}),
        ("/v1/messages", "output_format", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (
            "/v1/messages",
            "output_config.format",
            {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        (
            "/v1/models/policy:generateContent",
            "response_mime_type",
            {"generationConfig": {"responseMimeType": "application/json", "responseSchema": SCHEMA}},
        ),
        (
            "/v1/models/policy:generateContent",
            "response_schema",
            {"generationConfig": {"responseSchema": SCHEMA}},
        ),
    ],
)
def test_a_schema_for_the_answer_is_refused_wherever_a_dialect_has_it(
    served_plane: planes.ServedPlane, path: str, field: str, fields: dict[str, Any]
) -> None:
    served_plane.register()
    status, answer = asking.ask(served_plane, path, fields)
    assert (status, answer["error"]["message"].split(" and ")[0]) == (400, f"{field} is not supported")


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        ("/v1/chat/completions", [{"type": "function", "function": {"name": "f", "strict": True}}]),
        ("/v1/responses", [{"type": "function", "name": "f", "strict": True}]),
        ("/v1/messages", [{"name": "f", "strict": True}]),
        (
            "/v1/models/policy:generateContent",
            [{"functionDeclarations": [{"name": "f"}]}],
        ),
    ],
)
def test_schemas_of_calls_that_nobody_sees_to_are_counted(
    served_plane: planes.ServedPlane, renderer: Renderer, path: str, tools: list[dict[str, Any]]
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "the sum is 42."))
    validated = {"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}}
    assert asking.ask(served_plane, path, {"tools": tools, **validated})[0] == 200
    assert served_plane.get("/runs/run")["counters"]["left_out.strict"] == 1


def test_a_thread_is_refused_so_that_its_client_sends_the_whole_conversation(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "the sum is 42."))
    asked = {"max_tokens": 32, "model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    with Anthropic(base_url=served_plane.url, api_key="none") as client:
        with pytest.raises(ThreadUnsupportedRequestError, match="send the whole conversation in messages"):
            client.beta.messages.create(thread={"type": "create"}, **asked)
        thread = client.beta.messages.thread(unsupported_request_behavior="continue_unthreaded", **asked)
        for _ in range(2):
            assert "42" in str(thread.send({"role": "user", "content": "and now?"}).content)
    assert len(served_plane.asked[1].prompt_ids) > len(served_plane.asked[0].prompt_ids)


def test_tokens_are_counted_by_the_same_list(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    body = {"model": "policy", "messages": asking.HI, "min_p": 0.1}
    response = httpx.post(served_plane.url + "/v1/messages/count_tokens", json=body)
    assert response.status_code == 400 and "min_p" in response.json()["error"]["message"]


def test_only_fields_of_the_list_can_be_ignored() -> None:
    # of the second earlier versions could do nothing else
    for known in ("min_p", "chat_template_kwargs"):
        config = RunConfig.model_validate({"rollout": {"ignored_fields": [known]}})
        assert json.loads(config.model_dump_json())["rollout"]["ignored_fields"] == [known]
    for name, near in (("messages", "presence_penalty"), ("minp", "min_p")):
        with pytest.raises(
            ValueError, match=f"'{name}' is not a field that can be ignored; use for example .*{near}"
        ):
            RunConfig.model_validate({"rollout": {"ignored_fields": [name]}})


@pytest.mark.parametrize("path", [path for path in asking.REQUESTS if path != "/v1/completions"])
def test_the_chat_template_has_the_variables_of_a_request_and_others_of_them_are_another_conversation(
    served_plane: planes.ServedPlane, renderer: Renderer, tmp_path: Path, path: str
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(served_plane.model_dir, folder)
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8") + "{{ '<think>\\n\\n</think>' if enable_thinking is false }}",
        encoding="utf-8",
    )
    served_plane.model_dir = str(folder)
    served_plane.register(ignored_fields=[])
    served_plane.connect(planes.answering(renderer, "the sum is 42."))
    [claim] = served_plane.claim()
    at = f"/sessions/{claim['session_id']}"

    def prompt(**fields: Any) -> str:
        assert asking.ask(served_plane, at + path, asking.REQUESTS[path] | fields)[0] == 200
        return renderer.decode(list(served_plane.asked[-1].prompt_ids))

    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = prompt()
    without = prompt(**closed)
    assert without == plain + "<think>\n\n</think>" == prompt(**closed)
    assert prompt(chat_template_kwargs={"enable_thinking": True}) == plain
    prompts = served_plane.get(at)["prompts"]
    assert [one["branch_reason"] for one in prompts] == [None, "other_tools", "other_tools"]
    status, answer = asking.ask(
        served_plane, at + path, asking.REQUESTS[path] | {"chat_template_kwargs": {"tools": []}}
    )
    assert (status, answer["error"]["message"]) == (400, "chat_template_kwargs must not contain tools")


def test_a_run_that_ignored_the_variables_of_the_template_goes_on_doing_so(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(ignored_fields=["chat_template_kwargs"])
    served_plane.connect(planes.answering(renderer, "the sum is 42."))
    for fields in ({}, {"chat_template_kwargs": {"tools": 1}}):
        assert asking.ask(served_plane, "/v1/chat/completions", fields)[0] == 200
    assert served_plane.asked[0].prompt_ids == served_plane.asked[1].prompt_ids
