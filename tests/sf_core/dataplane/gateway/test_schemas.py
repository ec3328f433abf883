"""Answers that follow a schema, with a real engine and the public clients of every API that has schemas."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import numpy as np
import pytest
import torch
from annotated_types import Len
from anthropic import Anthropic
from google import genai
from msgspec.structs import asdict
from openai import OpenAI
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, Qwen3Config

from sf_core.dataplane.chat.answer_grammar import answer_grammar
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.engines.wire import Hello
from sf_core.types import Sampling
from storage.tables.schema import NOT_SAMPLED, Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench import waits
from tests.bench.dataplane import planes
from tests.bench.engines.model_folders import SIZE

CONTEXT = 512
MESSAGES: Any = [{"role": "user", "content": "what is the sum of 12 and 30?"}]


class Sum(BaseModel, extra="forbid"):
    kind: Literal["sum", "product"]
    terms: Annotated[list[Literal[12, 30]], Len(max_length=4)]
    is_even: bool


SCHEMA = Sum.model_json_schema()
JSON_SCHEMA = {"type": "json_schema", "name": "s", "schema": SCHEMA}


@pytest.fixture(scope="module")
def random_policy(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> str:
    """A random network with the tokenizer of `model_dir`."""
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    size = SIZE | {"vocab_size": Renderer(model_dir).vocab_size, "max_position_embeddings": CONTEXT}
    AutoModelForCausalLM.from_config(Qwen3Config(**size, head_dim=16)).save_pretrained(folder)
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    return str(folder)


@pytest.fixture
def constrained(tmp_path: Path, random_policy: str) -> Iterator[planes.ServedPlane]:
    with planes.running_app(grace_s=0.1) as url, planes.attended(url, tmp_path, random_policy) as plane:
        plane.register(
            follows_grammars=True,
            max_tokens=300,
            groups_per_batch=1,
            context_length=CONTEXT,
            weights_uri=random_policy,
        )
        lend(plane)
        yield plane


def lend(plane: planes.ServedPlane, lease: str = "r0") -> None:
    engine = TorchEngine(plane.model_dir, max_running=8, context_length=CONTEXT)
    plane.lend(engine, Hello("run", 1, lease, 0, lease, lease, 8))


Ask = Callable[[str, str], Any]


def chat(url: str, key: str) -> Any:
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        answer = client.chat.completions.parse(model="policy", messages=MESSAGES, response_format=Sum)
        return answer.choices[0].message.parsed


def chat_streamed(url: str, key: str) -> Any:
    with (
        OpenAI(base_url=f"{url}/v1", api_key=key) as client,
        client.chat.completions.stream(model="policy", messages=MESSAGES, response_format=Sum) as events,
    ):
        return events.get_final_completion().choices[0].message.parsed


def responses(url: str, key: str) -> Any:
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        return client.responses.parse(model="policy", input=MESSAGES, text_format=Sum).output_parsed


def messages(url: str, key: str) -> Any:
    with Anthropic(base_url=url, api_key=key) as client:
        answer = client.messages.parse(model="policy", messages=MESSAGES, max_tokens=200, output_format=Sum)
        return answer.parsed_output


def gemini(url: str, key: str, **config: Any) -> Any:
    with genai.Client(api_key=key, http_options={"base_url": url}) as client:
        answer = client.models.generate_content(
            model="policy",
            contents="what is the sum of 12 and 30?",
            config={"response_mime_type": "application/json", **config},
        )
        return answer.parsed


def gemini_by_type(url: str, key: str) -> Any:
    class Words(BaseModel):
        kind: Literal["sum", "product"]
        is_even: bool | None

    answer = gemini(url, key, response_schema=Words)
    assert isinstance(answer, Words)
    return Sum(kind=answer.kind, terms=[], is_even=bool(answer.is_even))


def gemini_by_json_schema(url: str, key: str) -> Any:
    return Sum.model_validate(gemini(url, key, response_json_schema=SCHEMA))


@pytest.mark.parametrize(
    "ask", [chat, chat_streamed, responses, messages, gemini_by_type, gemini_by_json_schema]
)
def test_a_client_gets_an_answer_of_its_type_from_any_policy(
    constrained: planes.ServedPlane, ask: Ask
) -> None:
    [claim] = constrained.claim()
    answer = ask(f"{constrained.url}/sessions/{claim['session_id']}", claim["key"])
    assert isinstance(answer, Sum)
    assert constrained.get("/runs/run")["counters"]["constrained_turns"] == 1


def test_samples_of_one_request_follow_its_schema_and_may_call_its_tools(
    constrained: planes.ServedPlane,
) -> None:
    [claim] = constrained.claim()
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    body = {"model": "policy", "messages": MESSAGES, "n": 12, "tools": [planes.CALC]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    answer = constrained.post(path, body | {"response_format": form}, claim["key"])
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    is_json = [content.startswith("{") for content in contents]
    assert {*is_json} == {True, False}
    for content, is_content in zip(contents, is_json, strict=True):
        if is_content:
            jsonschema.validate(json.loads(content), SCHEMA)
        else:
            assert content.startswith('<tool_call>\n{"name": "calc", "arguments":')


def test_an_answer_goes_on_in_its_schema_where_another_engine_takes_over(
    constrained: planes.ServedPlane,
) -> None:
    lend(constrained, "r1")
    terms = {"type": "array", "items": {"enum": [12, 30]}, "minItems": 60, "maxItems": 60}
    paths = [f"/sessions/{claim['session_id']}" for claim in constrained.claim(2)]

    def ask(path: str) -> Any:
        return json.loads(content_of(constrained, path, json_schema(terms)))

    with ThreadPoolExecutor() as agents:
        answers = [agents.submit(ask, path) for path in paths]
        while not all(answer.done() for answer in answers):
            for engine in constrained.live_engines():
                constrained.post("/runs/run/pause", {"mode": "evacuate", "engine": engine["id"]})
                constrained.post("/runs/run/resume", {"engine": engine["id"]})
        for answer in answers:
            jsonschema.validate(answer.result(), terms)
    rows = trained(constrained, paths)
    assert sum(row.interruptions for row in rows) > 0
    assert not any(row.loss_mask.any() for row in rows)


def test_what_followed_a_schema_is_recorded_and_does_not_train(constrained: planes.ServedPlane) -> None:
    paths = [f"/sessions/{claim['session_id']}" for claim in constrained.claim(2)]
    for path in paths:
        said = content_of(constrained, path, json_schema(SCHEMA))
        content_of(constrained, path, {}, said)
    for row in trained(constrained, paths):
        first, second = (span for span in row.turns if span.role == "assistant")
        sampled = row.policy_versions != NOT_SAMPLED
        assert sampled[first.start : first.end].all() and not row.loss_mask[first.start : first.end].any()
        assert row.loss_mask[second.start : second.end].all()
        assert np.isfinite(row.logprobs[sampled]).all()
    assert constrained.get("/runs/run")["counters"]["constrained_turns"] == 2


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def content_of(plane: planes.ServedPlane, path: str, form: dict[str, Any], *said: str) -> str:
    """The answer to a question, or to the next one after an answer."""
    later = [{"role": "assistant", "content": said[0]}, {"role": "user", "content": "more"}] if said else []
    body = {"model": "policy", "messages": [*MESSAGES, *later], **form}
    answer = plane.post(f"{path}/v1/chat/completions", body, plane.agent_key(path))
    return str(answer["choices"][0]["message"]["content"])


def trained(plane: planes.ServedPlane, paths: list[str]) -> list[Trajectory]:
    """The rows of the first batch, which these sessions fill."""
    for path in paths:
        plane.post(f"{path}/finish", {"status": "finished", "reward": 1.0})
    sealed = plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    return to_rows(read_trajectories(str(Path(plane.run_dir, "run", sealed["files"][0]["uri"]))))


def test_a_run_that_ignores_the_field_trains_on_unconstrained_answers(
    tmp_path: Path, random_policy: str
) -> None:
    with planes.running_app(grace_s=0.1) as url, planes.attended(url, tmp_path, random_policy) as plane:
        plane.register(
            follows_grammars=True,
            ignored_fields=["response_format"],
            context_length=CONTEXT,
            weights_uri=random_policy,
        )
        lend(plane)
        [claim] = plane.claim()
        said = content_of(plane, f"/sessions/{claim['session_id']}", json_schema(SCHEMA))
        with pytest.raises(ValueError):
            json.loads(said)
        assert "constrained_turns" not in plane.get("/runs/run")["counters"]


def test_every_field_of_a_request_reaches_the_engine_that_takes_it_over(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(follows_grammars=True)
    answer = planes.say(renderer, '{"kind": "sum"}')
    served_plane.connect(lambda prompt, seed: answer, "r0")
    served_plane.engines["r0"].steps_left = 2
    body = json_schema(SCHEMA) | {
        "model": "policy",
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 3,
        "seed": 11,
        "stream": True,
    }
    with ThreadPoolExecutor(1) as agent:
        asking = agent.submit(
            httpx.post, f"{served_plane.url}/v1/chat/completions", json=body, timeout=waits.patience()
        )
        waits.wait_until(lambda: served_plane.engines["r0"].steps_left == 0)
        served_plane.connect(lambda prompt, seed: answer, "r1")
        served_plane.post("/runs/run/leases/r0/revoke")
        assert asking.result().status_code == 200
    first, rest = served_plane.asked
    # a field that is added is missing here
    assert asdict(rest) | {"prompt_ids": [*rest.prompt_ids]} == {
        "request_id": first.request_id,
        "prompt_ids": [*first.prompt_ids, *answer[:2]],
        "position": 2,
        "max_tokens": 22,
        "stop_token_ids": tuple(renderer.stop_token_ids),
        "sampling": Sampling(temperature=0.5, top_p=0.75, top_k=3, seed=11),
        "stream": True,
        "grammar": answer_grammar(SCHEMA, [], renderer),
        "images": (),
    }


CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES_API = "/v1/messages"
GEMINI = "/v1/models/policy:generateContent"


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[str]:
    """URL of a data plane whose run follows schemas. Without an engine, it answers only what it refuses."""
    folder = tmp_path_factory.mktemp("follower")
    with planes.running_app(grace_s=0.1) as url, planes.attended(url, folder, model_dir) as plane:
        plane.register(follows_grammars=True)
        yield url


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"response_format": {"type": "grammar"}}, "response_format.type must be text, json_object or"),
        (CHAT, {"response_format": "json"}, "response_format must be an object, got a string"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format must contain a JSON Schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": 3}}, "must contain a JSON Schema"),
        (CHAT, json_schema({"type": "strin"}), "cannot be used: Invalid type: strin"),
        (CHAT, {"output_format": JSON_SCHEMA}, "output_format is not supported"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "s"}}},
            "text.format must contain",
        ),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format is not supported"),
        (MESSAGES_API, {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be"),
        (
            MESSAGES_API,
            {"output_format": {"type": "json_schema", "schema": []}},
            "output_format must contain a",
        ),
        (GEMINI, {"generationConfig": {"responseMimeType": "text/x.enum"}}, "response_mime_type must be"),
        (GEMINI, {"generationConfig": {"responseSchema": {}}}, "response_mime_type must be application/json"),
        (GEMINI, {"generationConfig": {"response_format": {"type": "json_object"}}}, "is not supported"),
    ],
)
def test_what_is_no_schema_is_refused_in_one_sentence(
    follower: str, path: str, fields: dict[str, Any], message: str
) -> None:
    asked = {"messages": MESSAGES, "input": "hi", "contents": [{"parts": [{"text": "hi"}]}], "max_tokens": 8}
    response = httpx.post(follower + path, json={"model": "policy"} | asked | fields)
    told = response.json()["error"]["message"]
    assert response.status_code == 400 and message in told and "\n" not in told


def test_gemini_schemas_are_read_as_google_writes_them(constrained: planes.ServedPlane) -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["a", "b"], "format": "enum"},
            "count": {"type": "INTEGER", "format": "int32", "minimum": 0, "maximum": 9},
            "none": {"type": "OBJECT", "nullable": True, "properties": {}},
            "some": {"type": "ARRAY", "items": {"type": "BOOLEAN"}, "minItems": "2", "maxItems": "2"},
        },
        "required": ["type", "count", "none", "some"],
        "propertyOrdering": ["type", "count", "none", "some"],
    }
    config = {"responseMimeType": "application/json", "responseSchema": schema}
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": config}
    answer = httpx.post(constrained.url + GEMINI, json=body, timeout=waits.patience()).json()
    said = json.loads(answer["candidates"][0]["content"]["parts"][0]["text"])
    assert said["type"] in ("a", "b") and 0 <= said["count"] <= 9 and said["none"] in ({}, None)
    assert [type(one) for one in said["some"]] == [bool, bool]
