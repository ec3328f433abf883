"""Errors say what the clients of a dialect act on: the words, types and codes of its provider."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
from google.genai import errors as google

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError, ContextOverflow
from sf_core.testing.dialects import read_events
from tests.bench.dataplane import clients, planes
from tests.sf_core.dataplane.gateway import overflows

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
EACH = pytest.mark.parametrize(
    "client", clients.CLIENTS, ids=[client.dialect.name for client in clients.CLIENTS]
)
LONG = "the " * 3000
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": LONG}]},
    "completions": {"prompt": LONG},
    "responses": {"input": LONG},
    "messages": {"messages": [{"role": "user", "content": LONG}]},
    "generate_content": {"contents": [{"role": "user", "parts": [{"text": LONG}]}]},
}
OVERFLOWS = {
    "chat": r"This model's maximum context length is 2048 tokens\. However, your messages resulted in (\d+) "
    r"tokens\. Please reduce the length of the messages",
    "completions": r"This model's maximum context length is 2048 tokens\. However, your prompt resulted in "
    r"(\d+) tokens\. Please reduce the length of the prompt",
    "responses": r"Your input exceeds the context window of this model\. This model's maximum context length "
    r"is 2048 tokens\. However, your input resulted in (\d+) tokens\. Please reduce the length of the input",
    "messages": r"prompt is too long: (\d+) tokens > 2047 maximum\. Please shorten the messages",
    "generate_content": r"The input token count \((\d+)\) exceeds the maximum number of tokens allowed "
    r"\(2047\)\. Please shorten the contents",
}
MATCHED: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    # github.com/BerriAI/litellm litellm/litellm_core_utils/exception_mapping_utils.py; mini-swe-agent,
    # aider and others catch the exception that it raises for these
    "litellm": [
        (r"this model's maximum context length is", ("chat", "completions", "responses")),
        (r"prompt is too long", ("messages",)),
        (r"exceeds the maximum number of tokens allowed", ("generate_content",)),
    ],
    # github.com/OpenHands/software-agent-sdk openhands-sdk/openhands/sdk/llm/exceptions/classifier.py; for
    # Gemini it goes by LiteLLM's exception
    "OpenHands": [
        (r"please reduce the length of", ("chat", "completions", "responses")),
        (r"input exceeds the context window", ("responses",)),
        (r"prompt is too long", ("messages",)),
    ],
    # github.com/badlogic/pi-mono packages/ai/src/utils/overflow.ts
    "pi": [
        (r"maximum context length is \d+ tokens", ("chat", "completions", "responses")),
        (r"exceeds the context window", ("responses",)),
        (r"prompt is too long", ("messages",)),
        (r"input token count.*exceeds the maximum", ("generate_content",)),
    ],
    # github.com/QwenLM/qwen-code packages/core/src/utils/contextLengthError.ts, with the counts that it reads
    "qwen-code": [
        (
            r"maximum context length is\s*(\d[\d,]*)\s*tokens?[\s\S]*?(?:resulted in|requested|used)"
            r"\s*(\d[\d,]*)\s*tokens?",
            ("chat", "completions", "responses"),
        ),
        (r"(\d[\d,]*)\s*tokens?\s*>\s*(\d[\d,]*)", ("messages",)),
        (
            r"input\s+token\s+(?:count|length)[^\d]*(\d[\d,]*)[\s\S]*?exceed(?:s|ed)?[\s\S]*?(?:maximum|limit)"
            r"[^\d]*(\d[\d,]*)",
            ("generate_content",),
        ),
    ],
    # github.com/cline/cline src/core/context/context-management/context-error-handling.ts
    "cline": [
        (r"context\s*(length|window)", ("chat", "completions", "responses")),
        (r"invalid_request_error", ("messages",)),
    ],
    # github.com/openai/codex codex-rs/codex-api/src/sse/responses.rs
    "codex": [(r'"code":"context_length_exceeded"', ("responses",))],
    # github.com/langchain-ai/langchain libs/partners/anthropic/langchain_anthropic/chat_models.py and
    # github.com/langchain-ai/langchainjs libs/providers/langchain-openai/src/utils/client.ts
    "langchain": [
        (r"prompt is too long", ("messages",)),
        (r"exceeds the context window", ("responses",)),
    ],
}
"""Patterns of overflows and the dialects in which a harness looks for them, by harness."""


def body_of(client: clients.Client, error: ApiError) -> dict[str, Any]:
    return dict(orjson.loads(orjson.dumps(client.dialect.error_body(error, "req_7"))))


def told(client: clients.Client, raised: Exception) -> tuple[int, str]:
    """Status and sentence of an exception of the client's package."""
    if isinstance(raised, google.APIError):
        return raised.code, str(raised.message)
    assert isinstance(raised, (openai.APIStatusError, anthropic.APIStatusError))
    return raised.status_code, str(raised)


@STREAMED
@EACH
def test_a_prompt_that_does_not_fit_is_told_in_the_words_of_the_provider(
    served_plane: planes.ServedPlane, client: clients.Client, streamed: bool
) -> None:
    served_plane.register()
    with client.agent(served_plane.url) as agent, pytest.raises(Exception) as refused:
        client.ask(agent, streamed, {**client.request, **PROMPTS[client.dialect.name]})
    status, sentence = told(client, refused.value)
    assert status == 400
    assert (counted := re.search(OVERFLOWS[client.dialect.name], sentence))
    # a prompt that is far too long is told by a lower bound
    assert int(counted[1]) >= 2048
    if isinstance(refused.value, openai.BadRequestError):
        assert (refused.value.code, refused.value.type) == (
            "context_length_exceeded",
            "invalid_request_error",
        )
        assert refused.value.param == client.dialect.overflow[1]


@EACH
def test_a_prompt_of_the_whole_context_is_over_the_maximum_that_is_told(client: clients.Client) -> None:
    error = ContextOverflow(2048, 2048).reword(*client.dialect.overflow)
    if client.dialect.name in ("messages", "generate_content"):
        tokens, most = map(int, re.findall(r"\d+", error.message))
        assert (tokens, most) == (2048, 2047)
    else:
        assert "the answer needs one token at least" in error.message


@EACH
def test_an_overflow_inside_a_stream_has_words_and_code_too(client: clients.Client) -> None:
    error = overflows.overflow_of(client)
    data = overflows.failed_stream(client, error)
    *_, event = read_events(data)
    failure = event["response"]["error"] if client.dialect.name == "responses" else event["error"]
    assert re.fullmatch(OVERFLOWS[client.dialect.name] + r"\b.*", failure["message"])
    http = clients.canned(client.http, data, "text/event-stream")
    with client.agent("http://canned", http) as agent, pytest.raises(Exception) as raised:
        client.ask(agent, True, client.request)
    assert error.message in str(raised.value)
    if isinstance(raised.value, openai.APIError):
        assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize("harness", MATCHED)
def test_harnesses_know_an_overflow_by_its_words(harness: str) -> None:
    by_name = {client.dialect.name: client for client in clients.CLIENTS}
    for pattern, dialects in MATCHED[harness]:
        for name in dialects:
            error = overflows.overflow_of(by_name[name])
            for said in (
                orjson.dumps(body_of(by_name[name], error)),
                overflows.failed_stream(by_name[name], error),
            ):
                assert re.search(pattern, said.decode(), re.IGNORECASE), (pattern, name)


def test_qwen_code_reads_both_counts() -> None:
    read = {}
    for pattern, dialects in MATCHED["qwen-code"]:
        for client in (client for client in clients.CLIENTS if client.dialect.name in dialects):
            found = re.search(pattern, overflows.overflow_of(client).message, re.IGNORECASE)
            assert found is not None
            read[client.dialect.name] = found.groups()
    assert read == {
        **dict.fromkeys(("chat", "completions", "responses"), ("2048", "2050")),
        **dict.fromkeys(("messages", "generate_content"), ("2050", "2047")),
    }


OPENAI_TYPES = {429: "requests", 500: "server_error", 502: "server_error", 503: "server_error"}
KINDS = {
    "messages": {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        502: "api_error",
        503: "overloaded_error",
    },
    "generate_content": {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        409: "ABORTED",
        413: "INVALID_ARGUMENT",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        502: "INTERNAL",
        503: "UNAVAILABLE",
    },
}
"""Type of an error, or what Google calls its status, by dialect and HTTP status; after 429 and 503 the client
may ask again."""


@EACH
@pytest.mark.parametrize("status", KINDS["messages"])
def test_an_error_has_the_type_of_the_provider_whole_and_streamed(
    client: clients.Client, status: int
) -> None:
    retry_after_s = 5 if status in (429, 503) else None
    error = ApiError(status, "It is so.", code="some_code", retry_after_s=retry_after_s)
    body = body_of(client, error)
    kinds = KINDS.get(
        client.dialect.name, dict.fromkeys(range(400, 500), "invalid_request_error") | OPENAI_TYPES
    )
    assert body["error"][client.kind_of_error] == kinds[status]
    *_, event = read_events(overflows.failed_stream(client, error))
    if client.dialect.name == "responses":
        assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
        codes = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}
        assert event["response"]["error"]["code"] == codes.get(status, "some_code")
    else:
        assert event == body


def test_a_run_that_is_over_is_not_told_as_an_overload() -> None:
    error = ApiError(503, "The run is complete.", code="run_over")
    [client] = [client for client in clients.CLIENTS if client.dialect.name == "messages"]
    assert body_of(client, error)["error"]["type"] == "api_error"


def test_google_tells_in_the_body_when_to_ask_again() -> None:
    [client] = [client for client in clients.CLIENTS if client.dialect.name == "generate_content"]
    error = ApiError(429, "Later.", retry_after_s=5)
    [details] = body_of(client, error)["error"]["details"]
    assert details == {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "5s"}
    assert "details" not in body_of(client, ApiError(429, "Never."))["error"]


@EACH
def test_a_wrong_key_and_an_unknown_model_raise_what_the_client_has_for_them(client: clients.Client) -> None:
    with planes.running_app(key="secret") as url:
        with client.agent(url) as agent, pytest.raises(Exception) as refused:
            client.ask(agent, False, client.request)
        assert told(client, refused.value)[0] == 401
        # by this LiteLLM knows that it is the key, and not the request
        assert "Incorrect API key provided" in str(refused.value)
    with planes.running_app() as url:
        with client.agent(url) as agent, pytest.raises(Exception) as refused:
            client.ask(agent, False, client.request)
        assert told(client, refused.value)[0] == 404
        if isinstance(refused.value, openai.APIStatusError):
            assert refused.value.code == "model_not_found"


@EACH
def test_every_response_has_an_id_where_its_client_looks(
    served_plane: planes.ServedPlane, renderer: Renderer, client: clients.Client
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "hi"))
    name = client.dialect.name
    if name == "generate_content":  # its package knows no ids
        return
    seen: set[str | None] = set()
    with client.agent(served_plane.url) as agent:
        asked = {
            "chat": lambda body: agent.chat.completions.create(**body),
            "completions": lambda body: agent.completions.create(**body),
            "responses": lambda body: agent.responses.create(**body),
            "messages": lambda body: agent.messages.create(**body),
        }[name]
        seen.add(asked({**client.request, client.max_tokens: 20})._request_id)
        with asked({**client.request, client.max_tokens: 20, "stream": True}) as stream:
            seen.add(stream.response.headers["request-id" if name == "messages" else "x-request-id"])
            list(stream)
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
            asked({**client.request, **PROMPTS[name]})
        seen.add(refused.value.request_id)
        if name == "messages":
            assert refused.value.body["request_id"] == refused.value.request_id
    assert len(seen) == 3 and all(re.fullmatch(r"req_[0-9a-f]{24}", str(one)) for one in seen)


def test_an_error_that_nobody_expected_has_its_id_too(
    served_plane: planes.ServedPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_plane.register()

    def fail(*_: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("sf_core.dataplane.gateway.endpoint.open_turns", fail)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    failed = httpx.post(f"{served_plane.url}/v1/messages", json=body)
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "api_error"
    assert failed.json()["request_id"] == failed.headers["request-id"] == failed.headers["x-request-id"]
