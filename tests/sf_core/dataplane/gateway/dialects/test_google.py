"""Google's generateContent with the `google-genai` client against a served data plane."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane import planes

HI: Any = {"role": "user", "parts": [{"text": "hi"}]}
EXPRESSION = {"type": "OBJECT", "properties": {"expression": {"type": "STRING"}}}
CALC: Any = {"name": "calc", "description": "Evaluates.", "parameters": EXPRESSION}
CALC_TOOL: Any = {"function_declarations": [CALC]}
TWO_CALLS = (
    "Sure. " + planes.tool_call_text(expression="1+1") + "\n" + planes.tool_call_text(expression="2+2")
)
HOW = pytest.mark.parametrize("how", ["whole", "stream"])


def client(url: str, key: str = "none", **options: Any) -> genai.Client:
    http = types.HttpOptions(base_url=url, timeout=20_000, **options)
    return genai.Client(api_key=key, vertexai=False, http_options=http)


def opened(plane: planes.ServedPlane) -> str:
    """URL of a new session, as its agent gives it to the client."""
    return str(plane.client.post("/sessions", {"run_id": "run"})["base_url"]).removesuffix("/v1")


def tree(plane: planes.ServedPlane, url: str) -> dict[str, Any]:
    return plane.get(f"/sessions/{url.rpartition('/')[2]}")


def is_one_row(plane: planes.ServedPlane, url: str) -> bool:
    shown = tree(plane, url)
    parents = [prompt["parent_turn"] for prompt in shown["prompts"]]
    return parents == [None, *range(len(shown["turns"]) - 1)] and not shown["branch_reasons"]


def ask(url: str, how: str = "whole", contents: Any = "hi", **config: Any) -> list[Any]:
    """The responses: one, or the chunks of a stream."""
    asked = {"model": "policy", "contents": contents, "config": config}
    with client(url) as agent:
        if how == "whole":
            return [agent.models.generate_content(**asked)]
        return list(agent.models.generate_content_stream(**asked))


def contents_of(chunks: list[Any]) -> list[Any]:
    return [chunk.candidates[0].content for chunk in chunks]


def calls_of(chunks: list[Any]) -> list[Any]:
    return [call for chunk in chunks for call in chunk.function_calls or ()]


def text_of(chunks: list[Any]) -> str:
    return "".join(part.text or "" for content in contents_of(chunks) for part in content.parts)


def test_text_streams_as_it_is_sampled(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    """In several pieces; how many tokens one carries is a matter of the machine's load (decision 021)."""
    served_plane.register(max_tokens=400, context_length=1024)
    text = "hello naïve 数学 " * 12 + "end"
    served_plane.connect(planes.answering(renderer, text))
    chunks = ask(served_plane.url, "stream")
    assert len(chunks) > 4 and text_of(chunks) == text
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert chunks[-1].usage_metadata.candidates_token_count == len(planes.say(renderer, text))


@pytest.mark.parametrize("with_ids", [True, False])
def test_tool_calls_and_their_results_make_one_token_sequence(
    served_plane: planes.ServedPlane, renderer: Renderer, with_ids: bool
) -> None:
    """`with_ids`: whether the client sends ids of calls and results; some do not. Of a stream it sends back
    several contents in a row."""
    served_plane.register(max_tokens=128)
    served_plane.connect(planes.answering(renderer, TWO_CALLS, "2 and 4"))
    url = opened(served_plane)
    first = ask(url, "stream", HI, tools=[CALC_TOOL])
    calls = calls_of(first)
    assert [call.args for call in calls] == [{"expression": "1+1"}, {"expression": "2+2"}]
    echo = contents_of(first)
    results = [
        types.FunctionResponse(id=call.id if with_ids else None, name="calc", response={"output": str(at)})
        for at, call in enumerate(calls)
    ]
    for call in calls if not with_ids else ():
        call.id = None
    result = types.Content(role="tool", parts=[types.Part(function_response=one) for one in results])
    second = ask(url, contents=[HI, *echo, result], tools=[CALC_TOOL])
    assert text_of(second) == "2 and 4"
    recorded = served_plane.asked[0].prompt_ids + planes.say(renderer, TWO_CALLS)
    assert served_plane.asked[1].prompt_ids[: len(recorded)] == recorded
    assert is_one_row(served_plane, url)
    said = [message["content"] for message in tree(served_plane, url)["prompts"][1]["messages"]]
    assert said == ["0", "1"]


def calc(expression: str) -> int:
    """Evaluates."""
    return {"1+1": 2, "2+2": 4}[expression]


def test_a_chat_that_calls_functions_by_itself_is_one_token_sequence(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=128)
    served_plane.connect(planes.answering(renderer, TWO_CALLS, "", "2 and 4", "You are welcome."))
    url = opened(served_plane)
    with client(url) as agent:
        chat = agent.chats.create(model="policy", config={"tools": [calc], "system_instruction": "be brief"})
        for message in ("1+1 and 2+2?", "well?", "thanks"):
            said = [*chat.send_message_stream(message)]
    assert text_of(said) == "You are welcome."
    assert len(served_plane.asked) == 4 and is_one_row(served_plane, url)
    shown = tree(served_plane, url)["prompts"]
    assert [message["content"] for message in shown[0]["messages"]] == ["be brief", "1+1 and 2+2?"]
    assert [message["content"] for message in shown[1]["messages"]] == ["2", "4"]


def test_of_the_allowed_functions_the_model_is_shown_those_alone(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    tools = [{"function_declarations": [CALC | {"name": name} for name in ("add", "sub", "mul")]}]
    for mode in ("VALIDATED", "AUTO"):
        config = {"function_calling_config": {"mode": mode, "allowed_function_names": ["add", "mul"]}}
        ask(served_plane.url, tools=tools, tool_config=config)
        shown = renderer.decode(list(served_plane.asked[-1].prompt_ids))
        assert [f'"{name}"' in shown for name in ("add", "sub", "mul")] == [True, False, True]


def test_types_of_a_google_schema_are_told_as_those_of_a_json_schema(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    ask(served_plane.url, tools=[CALC_TOOL])
    shown = renderer.decode(list(served_plane.asked[0].prompt_ids))
    assert '"object"' in shown and '"string"' in shown and "OBJECT" not in shown


def test_tools_of_the_provider_are_left_out_and_counted(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    ask(served_plane.url, tools=[{"google_search": {}}, {"url_context": {}, "code_execution": {}}])
    ask(served_plane.url)
    assert served_plane.asked[0].prompt_ids == served_plane.asked[1].prompt_ids
    counters = served_plane.get("/runs/run")["counters"]
    left_out = {name: count for name, count in counters.items() if name.startswith("left_out.")}
    assert left_out == {f"left_out.{kind}": 1 for kind in ("code_execution", "google_search", "url_context")}


@HOW
def test_a_stop_sequence_ends_the_answer_before_it(
    served_plane: planes.ServedPlane, renderer: Renderer, how: str
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "one two three four"))
    answer = ask(served_plane.url, how, stop_sequences=["zzz", "three"])
    assert text_of(answer) == "one two "
    assert answer[-1].candidates[0].finish_reason == types.FinishReason.STOP


@HOW
def test_candidates_are_turns_of_one_prompt(
    served_plane: planes.ServedPlane, renderer: Renderer, how: str
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "one", "two"))
    url = opened(served_plane)
    said = {0: "", 1: ""}
    for chunk in ask(url, how, candidate_count=2):
        for candidate in chunk.candidates:
            said[candidate.index] += candidate.content.parts[0].text
    assert sorted(said.values()) == ["one", "two"]
    shown = tree(served_plane, url)
    assert (len(shown["prompts"]), len(shown["turns"])) == (1, 2)


def test_an_answer_is_rewarded_by_its_response_id(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    url = opened(served_plane)
    [answer] = ask(url)
    path = f"/sessions/{url.rpartition('/')[2]}"
    served_plane.post(f"{path}/reward", {"reward": 1.0, "step_rewards": {answer.response_id: 0.5}})
    assert served_plane.get(path)["step_rewards"] == {answer.response_id: 0.5}


def test_tokens_are_counted_without_a_turn(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    url = opened(served_plane)
    expected = len(renderer.encode(renderer.render([{"role": "user", "content": "hi"}], [])))
    with client(url) as agent:
        assert agent.models.count_tokens(model="policy", contents="hi").total_tokens == expected
    request = {"model": "models/policy", "contents": [HI]}
    path = "/v1beta/models/policy:countTokens"
    assert served_plane.post(path, {"generateContentRequest": request}) == {"totalTokens": expected}
    assert tree(served_plane, url)["prompts"] == []


def test_a_session_is_named_by_the_key_in_the_header_or_the_query(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    url = opened(served_plane)
    key = f"session:{url.rpartition('/')[2]}"
    with client(served_plane.url, key, api_version="v1") as agent:
        assert agent.models.generate_content(model="policy", contents="hi").text == "yes"
    for version in ("v1", "v1beta"):
        path = f"/{version}/models/policy:generateContent?key={key}"
        assert served_plane.client.post(path, {"contents": [HI]})["candidates"][0]["content"]["parts"] == [
            {"text": "yes"}
        ]
    assert len(tree(served_plane, url)["turns"]) == 3


def test_models_are_listed_in_the_shape_of_the_asker(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    for url in (served_plane.url, opened(served_plane)):
        with client(url) as agent:
            assert [model.name for model in agent.models.list()] == ["models/policy"]
            assert agent.models.get(model="policy").name == "models/policy"
            with pytest.raises(errors.ClientError, match="The model 'gpt' does not exist here"):
                agent.models.get(model="gpt")
    assert set(served_plane.get("/v1beta/models")) == {"models"}
    assert served_plane.get("/v1/models")["object"] == "list"


BAD_REQUESTS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "gpt"}, 404, "NOT_FOUND", "The model 'gpt' does not exist here"),
    ({"contents": "the " * 3000}, 400, "INVALID_ARGUMENT", "exceeds the maximum number of tokens allowed"),
    ({"contents": "a" * 9_000_000}, 413, "INVALID_ARGUMENT", "over the limit"),
    ({"config": {"temperature": 3}}, 400, "INVALID_ARGUMENT", "temperature must be between 0 and 2"),
    ({"config": {"presence_penalty": 1.0}}, 400, "INVALID_ARGUMENT", "presence_penalty is not supported"),
    (
        {"config": {"response_mime_type": "application/json", "response_schema": {"type": "STRING"}}},
        400,
        "INVALID_ARGUMENT",
        "response_mime_type is not supported",
    ),
    (
        {"contents": types.Part.from_bytes(data=b"x", mime_type="image/png")},
        400,
        "INVALID_ARGUMENT",
        "inline_data parts are not supported",
    ),
]


@HOW
def test_bad_requests_raise_what_the_client_has_for_them(served_plane: planes.ServedPlane, how: str) -> None:
    served_plane.register()
    with client(served_plane.url) as agent:
        for change, code, status, sentence in BAD_REQUESTS:
            asked: dict[str, Any] = {"model": "policy", "contents": "hi"} | change
            with pytest.raises(errors.ClientError, match=sentence) as refused:
                if how == "whole":
                    agent.models.generate_content(**asked)
                else:
                    list(agent.models.generate_content_stream(**asked))
            assert (refused.value.code, refused.value.status) == (code, status)
            assert set(refused.value.details["error"]) == {"code", "message", "status"}


@pytest.mark.parametrize("version", ["v1", "v1beta"])
def test_what_is_no_request_is_refused_in_googles_shape_whatever_the_headers(
    served_plane: planes.ServedPlane, version: str
) -> None:
    served_plane.register()
    for content, sentence in [("{", "not valid JSON"), ("[]", "must be a JSON object, got a list")]:
        for method in ("generateContent", "streamGenerateContent", "countTokens"):
            response = served_plane.http.post(f"/{version}/models/policy:{method}", content=content)
            assert (response.status_code, sentence in response.text) == (400, True)
            assert set(response.json()["error"]) == {"code", "message", "status"}


def test_a_session_that_is_over_is_told(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    with pytest.raises(errors.ClientError, match="Session nobody is unknown or has ended") as refused:
        ask(f"{served_plane.url}/sessions/nobody")
    assert (refused.value.code, refused.value.status) == (404, "NOT_FOUND")


def test_the_key_may_come_in_the_header_or_the_query() -> None:
    with planes.running_app(key="secret") as url:
        with client(url, "secret") as agent:
            assert list(agent.models.list()) == []
        for key in ("wrong", "secret-but-longer"):
            with (
                client(url, key) as agent,
                pytest.raises(errors.ClientError, match="missing or wrong") as refused,
            ):
                agent.models.generate_content(model="policy", contents="hi")
            assert (refused.value.code, refused.value.status) == (401, "UNAUTHENTICATED")
        assert httpx.get(f"{url}/v1beta/models?key=secret").json() == {"models": []}
        refusal = httpx.get(f"{url}/v1beta/models?key=wrong")
        assert (refusal.status_code, refusal.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        # what is in a query may be logged: it opens no more than it must
        assert httpx.get(f"{url}/metrics?key=secret").status_code == 401
