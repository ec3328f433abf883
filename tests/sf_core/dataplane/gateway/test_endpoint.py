"""The agents' side, with the real `openai` client over real HTTP."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.gateway.endpoint import MAX_BYTES_WITH_IMAGES
from tests.bench import waits
from tests.bench.dataplane import planes

HI: Any = [{"role": "user", "content": "hi"}]


def client(plane: planes.ServedPlane, session_id: str | None = None) -> OpenAI:
    base = plane.url if session_id is None else f"{plane.url}/sessions/{session_id}"
    key = plane.agent_key(session_id)
    return OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=waits.patience())


def ask(plane: planes.ServedPlane, session_id: str | None = None, messages: Any = HI, **options: Any) -> Any:
    with client(plane, session_id) as agent:
        return agent.chat.completions.create(model="policy", messages=messages, **options)


def stream(
    plane: planes.ServedPlane, session_id: str | None = None, messages: Any = HI, **options: Any
) -> list[Any]:
    with client(plane, session_id) as agent:
        options.setdefault("stream_options", {"include_usage": True})
        return list(agent.chat.completions.create(model="policy", messages=messages, stream=True, **options))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_stream_sends_tokens_as_they_come_and_ends_with_usage(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "hello naïve 数学"))
    engine = served_plane.engines["r0"]
    engine.steps_left = 3
    chunks: list[Any] = []
    with client(served_plane) as agent:
        for chunk in agent.chat.completions.create(
            model="policy", messages=HI, stream=True, stream_options={"include_usage": True}
        ):
            chunks.append(chunk)
            if text_of([chunk]):
                engine.steps_left = None
    assert text_of(chunks) == "hello naïve 数学"
    # the engine holds until the first has been read
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(planes.say(renderer, "hello naïve 数学"))


def test_a_stream_tells_proxies_to_pass_its_events_on_at_once(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "hello"))
    body = {"model": "policy", "messages": HI, "stream": True}
    with httpx.stream("POST", f"{served_plane.url}/v1/chat/completions", json=body) as response:
        told = response.headers
        assert (told["x-accel-buffering"], told["cache-control"]) == ("no", "no-cache")


@pytest.mark.parametrize("ask_how", ["whole", "stream"])
def test_tool_calls_and_their_results_make_one_token_sequence(
    served_plane: planes.ServedPlane, renderer: Renderer, ask_how: str
) -> None:
    served_plane.register()
    first_text = "Sure. " + planes.tool_call_text(expression="47*83")
    served_plane.connect(planes.answering(renderer, first_text, "3901"))
    [claim] = served_plane.claim()
    if ask_how == "whole":
        choice = ask(served_plane, claim["session_id"], tools=[planes.CALC]).choices[0]
        message = choice.message.model_dump(exclude_none=True)
        reason = choice.finish_reason
    else:
        chunks = stream(served_plane, claim["session_id"], tools=[planes.CALC])
        [call] = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
        message = {"role": "assistant", "content": text_of(chunks), "tool_calls": [call.model_dump()]}
        reason = chunks[-2].choices[0].finish_reason
    assert (message["content"], reason) == ("Sure. ", "tool_calls")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"expression": "47*83"}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3901"}
    assert (
        ask(served_plane, claim["session_id"], [*HI, message, result], tools=[planes.CALC])
        .choices[0]
        .message.content
    )
    first, second = served_plane.asked
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    recorded = first.prompt_ids + planes.say(renderer, first_text)
    assert second.prompt_ids[: len(recorded)] == recorded


def test_a_call_of_an_unknown_tool_is_passed_on_as_text(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    served_plane.connect(planes.answering(renderer, text))
    choice = ask(served_plane, tools=[planes.CALC]).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert served_plane.get("/runs/run")["counters"]["unparsed_calls"] == 1


def test_with_tool_choice_none_nothing_is_parsed(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    text = planes.tool_call_text(expression="1+1")
    served_plane.connect(planes.answering(renderer, text))
    assert ask(served_plane, tools=[planes.CALC], tool_choice="none").choices[0].message.content == text


@pytest.mark.parametrize("streamed", [False, True])
def test_samples_are_turns_of_one_prompt(
    served_plane: planes.ServedPlane, renderer: Renderer, streamed: bool
) -> None:
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, f"seed {seed}"))
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    if streamed:
        chunks = stream(served_plane, opened["session_id"], n=3, seed=5)
        texts = ["", "", ""]
        usage = chunks[-1].usage
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.delta.content or ""
    else:
        answer = ask(served_plane, opened["session_id"], n=3, seed=5)
        texts = [choice.message.content for choice in answer.choices]
        usage = answer.usage
    assert texts == ["seed 5", "seed 6", "seed 7"]
    assert usage.completion_tokens == 3 * len(planes.say(renderer, "seed 5"))
    tree = served_plane.get(f"/sessions/{opened['session_id']}")
    assert ([turn["prompt"] for turn in tree["turns"]], tree["branch_reasons"]) == ([0, 0, 0], {})


CALC_CHOICE = {"type": "function", "function": {"name": "calc"}}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "opening", "rest"),
    [
        ("required", '<tool_call>\n{"name":', ' "calc", "arguments": {"expression": "1+1"}}\n</tool_call>'),
        (
            CALC_CHOICE,
            '<tool_call>\n{"name": "calc", "arguments":',
            ' {"expression": "1+1"}}\n</tool_call>',
        ),
    ],
)
def test_a_forced_call_begins_in_the_prompt_and_is_not_trained(
    served_plane: planes.ServedPlane, renderer: Renderer, streamed: bool, choice: Any, opening: str, rest: str
) -> None:
    served_plane.register(max_tokens=64, group_size=1, groups_per_batch=1)
    served_plane.connect(planes.answering(renderer, rest, "2"))
    [claim] = served_plane.claim()
    session_id = claim["session_id"]
    if streamed:
        chunks = stream(served_plane, session_id, tools=[planes.CALC], tool_choice=choice)
        [call] = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
        assert text_of(chunks) == ""
        reason = chunks[-2].choices[0].finish_reason
    else:
        [answer] = ask(served_plane, session_id, tools=[planes.CALC], tool_choice=choice).choices
        [call] = answer.message.tool_calls
        reason = answer.finish_reason
    assert reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("calc", {"expression": "1+1"})
    prompt = renderer.encode(renderer.render(HI, [planes.CALC]) + opening).tolist()
    assert served_plane.asked[0].prompt_ids == prompt
    message = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    ask(served_plane, session_id, [*HI, message, result], tools=[planes.CALC])
    recorded = prompt + planes.say(renderer, rest)
    assert served_plane.asked[1].prompt_ids[: len(recorded)] == recorded
    tree = served_plane.get(f"/sessions/{session_id}")
    assert tree["prompts"][1]["parent_turn"] == 0
    assert tree["turns"][0]["num_tokens"] == len(planes.say(renderer, rest))


def test_a_forced_call_that_does_not_parse_is_passed_on_as_text(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, " rubbish"))
    choice = ask(served_plane, tools=[planes.CALC], tool_choice="required").choices[0]
    assert choice.message.content == '<tool_call>\n{"name": rubbish'
    assert served_plane.get("/runs/run")["counters"]["unparsed_calls"] == 1


def test_one_call_only_where_parallel_ones_are_not_wanted(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    text = planes.tool_call_text(expression="1+1")
    served_plane.connect(planes.answering(renderer, text + text))
    assert len(ask(served_plane, tools=[planes.CALC]).choices[0].message.tool_calls) == 2
    answer = ask(served_plane, tools=[planes.CALC], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.usage.completion_tokens == len(renderer.encode(text))


def test_sessions_of_a_run_are_sampled_as_the_run_says(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=4)
    served_plane.connect(planes.answering(renderer, "the quick brown fox jumps"))
    [claim] = served_plane.claim()
    for temperature in (0.1, 1.7):
        ask(served_plane, claim["session_id"], temperature=temperature, top_p=0.5, max_tokens=100)
    ask(served_plane, temperature=0.1, seed=5, max_completion_tokens=3)
    first, again, unnamed = (request.sampling for request in served_plane.asked)
    assert (first.temperature, first.top_p, first.top_k) == (0.9, 0.95, 5)
    assert first.seed != again.seed
    assert [request.max_tokens for request in served_plane.asked] == [4, 4, 3]
    assert (unnamed.temperature, unnamed.top_k, unnamed.seed) == (0.1, 0, 5)


def test_engines_and_sessions_get_the_temperature_that_logits_can_be_divided_by(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(temperature=1e-38)
    served_plane.connect(planes.answering(renderer, "the quick brown fox jumps"))
    [claim] = served_plane.claim()
    ask(served_plane, claim["session_id"])
    ask(served_plane, temperature=1e-38)
    assert [request.sampling.temperature for request in served_plane.asked] == [0.01, 0.01]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_answer_before_it(
    served_plane: planes.ServedPlane, renderer: Renderer, streamed: bool
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "one two three four five"))
    [claim] = served_plane.claim()
    if streamed:
        chunks = stream(served_plane, claim["session_id"], stop=["three", "zzz"])
        text = text_of(chunks)
        reason = chunks[-2].choices[0].finish_reason
    else:
        choice = ask(served_plane, claim["session_id"], stop="three").choices[0]
        text = choice.message.content
        reason = choice.finish_reason
    assert (text, reason) == ("one two ", "stop")
    assert served_plane.get("/runs/run")["engines"][0]["running"] == 0


def test_models_are_listed_in_the_shape_of_the_asker(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    [claim] = served_plane.claim()
    for session_id in (None, claim["session_id"]):
        assert [model.id for model in client(served_plane, session_id).models.list()] == ["policy"]
        assert client(served_plane, session_id).models.retrieve("policy").id == "policy"
        with pytest.raises(openai.NotFoundError, match="other/model"):
            client(served_plane, session_id).models.retrieve("other/model")
    [model] = served_plane.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert (model["id"], model["type"]) == ("policy", "model")


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be at least 1"),
    ({"top_logprobs": 2}, "top_logprobs is not supported"),
    ({"messages": [{"role": "user", "content": "the " * 3000}]}, "maximum context length is 2048 tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
]


@pytest.mark.parametrize("name", [None, "coder"])
def test_however_a_client_appends_an_answer_its_tokens_are_the_recorded_ones(
    served_plane: planes.ServedPlane, renderer: Renderer, name: str | None
) -> None:
    served_plane.register(max_tokens=128)
    texts = ["so", "Sure. " + planes.tool_call_text(expression="1+1")]
    said = [answer for text in texts for _ in HOW_APPENDED for answer in (text, "done")]
    served_plane.connect(planes.answering(renderer, *said))
    for text, append in itertools.product(texts, HOW_APPENDED):
        opened = served_plane.client.post("/sessions", {"run_id": "run"})["session_id"]
        message = ask(served_plane, opened, tools=[planes.CALC]).choices[0].message
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls or []
        ]
        named = message if name is None else message.model_copy(update={"name": name})
        first = served_plane.asked[-1].prompt_ids
        ask(served_plane, opened, [*HI, append(named), *(results or HI)], tools=[planes.CALC])
        recorded = first + planes.say(renderer, text)
        assert served_plane.asked[-1].prompt_ids[: len(recorded)] == recorded
        assert served_plane.get(f"/sessions/{opened}")["branch_reasons"] == {}


HOW_APPENDED: list[Any] = [
    lambda message: message,
    lambda message: message.model_dump(),
    lambda message: message.model_dump(exclude_none=True),
]


def test_messages_that_the_template_fails_on_are_refused_with_what_it_says(
    served_plane: planes.ServedPlane, model_dir: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8") + "{{ messages[0].name + none }}", encoding="utf-8"
    )
    served_plane.register(model_dir=str(folder))
    sentence = "The chat template refuses these messages: TypeError: can only concatenate str"
    with pytest.raises(openai.BadRequestError, match=sentence):
        ask(served_plane, messages=[HI[0] | {"name": "me"}])


def test_bad_requests_get_a_sentence_in_the_shape_clients_expect(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    for change, sentence in BAD_REQUESTS:
        body = {"model": "policy", "messages": HI} | change
        response = served_plane.http.post("/v1/chat/completions", json=body)
        assert (response.status_code, sentence in response.text) == (400, True), response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    for content, sentence in [(b"{", "not valid JSON"), (b"[]", "must be a JSON object, got a list")]:
        response = served_plane.http.post("/v1/chat/completions", content=content)
        assert (response.status_code, sentence in response.text) == (400, True)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(served_plane, messages=[{"role": "user", "content": "the " * 3000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="Session nobody is unknown or has ended"):
        ask(served_plane, "nobody")
    assert served_plane.http.get("/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_dialect_refuses_in_its_own_shape(served_plane: planes.ServedPlane, path: str) -> None:
    served_plane.register()
    shape = {"type", "error", "request_id"} if path == "/v1/messages" else {"error"}
    large = json.dumps({"model": "policy", "x": "a" * 9_000_000})
    for content, status, sentence in [
        ("{", 400, "not valid JSON"),
        ("[]", 400, "must be a JSON object, got a list"),
        ('{"model": "gpt"}', 404, "does not exist here"),
        ('{"model": 5}', 400, "model must be a string"),
        ('{"model": "policy"}', 400, "must be"),
        (large, 413, "over the limit"),
    ]:
        response = served_plane.http.post(path, content=content)
        if path == "/v1/messages" and sentence == "must be":
            sentence = "is required"
        assert (response.status_code, sentence in response.text) == (status, True), response.text
        assert set(response.json()) == shape
    with planes.running_app(key="secret") as url:
        refused = httpx.post(url + path, json={})
        assert (refused.status_code, set(refused.json())) == (401, shape)


def test_a_body_has_a_limit_whatever_its_images_take(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    content = b"{" + b" " * MAX_BYTES_WITH_IMAGES
    refused = served_plane.http.post("/v1/chat/completions", content=content)
    assert (refused.status_code, str(MAX_BYTES_WITH_IMAGES) in refused.text) == (413, True), refused.text


def test_a_client_that_goes_away_stops_its_generation(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=2000)
    served_plane.connect(lambda prompt, seed: renderer.encode("the " * 500).tolist() * 4)
    [claim] = served_plane.claim()
    with client(served_plane, claim["session_id"]) as agent:
        chunks = iter(agent.chat.completions.create(model="policy", messages=HI, stream=True))
        next(chunks)
        next(chunks)
    waits.wait_until(lambda: served_plane.get("/runs/run")["counters"].get("abandoned_turns") == 1)
    waits.wait_until(lambda: served_plane.get("/runs/run")["engines"][0]["running"] == 0)


def test_requests_wait_until_there_is_an_engine(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    answers: list[Any] = []
    agent = threading.Thread(target=lambda: answers.append(ask(served_plane)))
    agent.start()
    waits.wait_until(lambda: served_plane.get("/runs/run")["requests_waiting"] == 1)
    served_plane.connect(planes.answering(renderer, "at last"))
    waits.join(agent)
    assert answers[0].choices[0].message.content == "at last"


@pytest.fixture
def locked_url() -> Iterator[str]:
    with planes.running_app(key="secret") as url:
        yield url


def test_with_a_key_every_route_asks_for_it(locked_url: str) -> None:
    for path in ("/healthz", "/v1/models", "/runs/run", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            response = httpx.get(locked_url + path, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(locked_url + "/healthz", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert OpenAI(base_url=f"{locked_url}/v1", api_key="secret").models.list().data == []
