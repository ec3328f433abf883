"""Requests that the data plane must refuse, in every dialect and on every route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sf_core.dataplane.api_schemas import MAX_PARTS, MAX_STEPS
from sf_core.dataplane.gateway.dialects.checks import MAX_STOPS, MAX_TOOLS, MAX_TOOLS_BYTES
from tests.bench import refusals
from tests.bench.dataplane import planes, specs

HI = [{"role": "user", "content": "hi"}]


def _call(values: list[int]) -> dict[str, Any]:
    function = {"name": "calc", "arguments": json.dumps({"a": values})}
    return {"id": "c1", "type": "function", "function": function}


CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
TOOL = {"name": "calc", "description": "Evaluates.", "input_schema": {"type": "object"}}
LIMITS = {"temperature": 0.5, "top_p": 0.9, "stream": False}

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
GOOGLE = "/v1/models/policy:generateContent"
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "policy",
        "messages": [
            *HI,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1"},
        ],
        "tools": [planes.CALC],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tokens": 8,
        "max_completion_tokens": 8,
        "n": 1,
        "stop": ["!"],
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 0,
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        **LIMITS,
    },
    COMPLETIONS: {
        "model": "policy",
        "prompt": "hi",
        "max_tokens": 8,
        "n": 1,
        "best_of": 1,
        "stop": "!",
        "seed": 1,
        "logprobs": 0,
        "echo": False,
        "suffix": "",
        "stream_options": {},
        **LIMITS,
    },
    RESPONSES: {
        "model": "policy",
        "input": [*HI, {"type": "function_call", "name": "calc", "call_id": "c1", "arguments": "{}"}],
        "instructions": "Be brief.",
        "tools": [{"type": "function", **planes.CALC["function"]}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": 8,
        "include": [],
        "text": {"format": {"type": "text"}},
        "store": True,
        "previous_response_id": None,
        "background": False,
        **LIMITS,
    },
    MESSAGES: {
        "model": "policy",
        "messages": HI,
        "system": "Be brief.",
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "max_tokens": 8,
        "stop_sequences": ["!"],
        "top_k": 3,
        "metadata": {},
        **LIMITS,
    },
    GOOGLE: {
        "contents": [
            {"parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "calc", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "calc", "response": {"output": "4"}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "calc", "parameters": {"type": "OBJECT"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"maxOutputTokens": 8, "temperature": 0.5},
        "topK": 3,
        "candidateCount": 1,
        "seed": 1,
        "responseLogprobs": True,
        "logprobs": 0,
        "stopSequences": ["!"],
        "responseMimeType": "text/plain",
        "cachedContent": None,
        "safetySettings": [],
    },
}

DEEP: Any = "x"
for _ in range(600):
    DEEP = {"a": DEEP}

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    10**30,
    "",
    "x",
    [],
    [1],
    ["x"],
    [None],
    [[]],
    [{}],
    {},
    {"a": 1},
]
ODD += [{"type": "x"}, {"role": "x"}, [{"role": "user", "content": [{}]}], DEEP, [DEEP], "\ud800"]


def ask(plane: planes.ServedPlane, path: str, body: Any, method: str = "POST") -> tuple[int, str]:
    """Status and sentence of a refusal; checks that it is one sentence and that nothing has changed."""
    before = refusals.snapshot(plane.run_dir)
    num_asked = len(plane.asked)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = plane.http.request(method, path, content=None if method == "GET" else content)
    assert response.status_code < 500, response.text
    assert response.headers["content-type"].startswith(("application/json", "text/event-stream"))
    if response.status_code < 400:
        return response.status_code, ""
    sentence = str(response.json()["error"]["message"])
    refusals.check_sentence(sentence)
    assert plane.model_dir not in response.text and str(plane.run_dir) not in response.text
    assert (refusals.snapshot(plane.run_dir), len(plane.asked)) == (before, num_asked)
    return response.status_code, sentence


@pytest.mark.parametrize("path", REQUESTS)
def test_a_whole_request_is_answered(refusing_plane: planes.ServedPlane, path: str) -> None:
    assert ask(refusing_plane, path, REQUESTS[path])[0] == 200


FIELDS = [(path, field) for path, request in REQUESTS.items() for field in request]


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_odd_values_of_a_field_are_answered_or_refused(
    refusing_plane: planes.ServedPlane, path: str, field: str
) -> None:
    refused = [ask(refusing_plane, path, REQUESTS[path] | {field: value})[1] for value in ODD]
    if field not in ("store", "metadata", "safetySettings"):
        assert any(refused)


NESTED: list[tuple[str, str, Any]] = [
    (CHAT, "messages[0]", {"messages": ["hi"]}),
    (CHAT, "messages[0].content", {"messages": [{"role": "user", "content": {"text": "hi"}}]}),
    (CHAT, "messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, "messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
    (CHAT, "messages", {"messages": [*HI, {"role": "tool", "tool_call_id": ["c1"]}]}),
    (CHAT, "messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": "calc"}]}),
    (CHAT, "messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
    (CHAT, "tools[0]", {"tools": [{"type": "function", "function": {"name": 5}}]}),
    (CHAT, "tools", {"tools": "calc"}),
    (CHAT, "role", {"messages": [{"role": "x" * 100_000}]}),
    (CHAT, "tool_choice", {"tool_choice": {"type": "function", "function": {"name": "x" * 100_000}}}),
    (CHAT, "model", {"model": "x" * 100_000}),
    (CHAT, "model", {"model": None}),
    (CHAT, "seed", {"seed": "1"}),
    (COMPLETIONS, "prompt", {"prompt": [[1, "x"]]}),
    (COMPLETIONS, "Token ids", {"prompt": [10**9]}),
    (COMPLETIONS, "Token ids", {"prompt": [-1]}),
    (COMPLETIONS, "prompts times n", {"prompt": ["a"] * 100, "n": 2, "best_of": 2}),
    (RESPONSES, "input[0]", {"input": [{"type": "computer_call"}]}),
    (RESPONSES, "input[0]", {"input": [{"type": "function_call", "name": "f"}]}),
    (RESPONSES, "input[0].role", {"input": [{"role": "x" * 100_000}]}),
    (RESPONSES, "input[0]", {"input": [{"type": "x" * 100_000}]}),
    (RESPONSES, "Response", {"previous_response_id": "x" * 100_000}),
    (RESPONSES, "tools[0]", {"tools": [{"type": "file_search"}]}),
    (RESPONSES, "input", {"input": [{"type": "function_call_output", "call_id": {}, "output": "4"}]}),
    (MESSAGES, "messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    (MESSAGES, "messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    (MESSAGES, "messages[0].content[0]", {"messages": [{"role": "user", "content": ["hi"]}]}),
    (MESSAGES, "messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    (MESSAGES, "tools[0]", {"tools": [{"name": "bash", "type": "x" * 100_000}]}),
    (MESSAGES, "tool_choice", {"tool_choice": {"type": "tool", "name": "x" * 100_000}}),
    (MESSAGES, "max_tokens", {"max_tokens": None}),
    (GOOGLE, "contents[0]", {"contents": ["hi"]}),
    (GOOGLE, "contents[0].role", {"contents": [{"role": "x" * 100_000}]}),
    (GOOGLE, "contents[0].parts[0]", {"contents": [{"parts": ["hi"]}]}),
    (GOOGLE, "contents[0].parts[0]", {"contents": [{"parts": [{"inlineData": {}}]}]}),
    (GOOGLE, "contents[0].parts[0]", {"contents": [{"parts": [{"x" * 100_000: 1}]}]}),
    (GOOGLE, "contents[0].parts[0]", {"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]}),
    (GOOGLE, "id", {"contents": [{"parts": [{"functionResponse": {"name": "f", "id": {}}}]}]}),
    (GOOGLE, "system_instruction", {"systemInstruction": "Be brief."}),
    (
        GOOGLE,
        "system_instruction.parts[0]",
        {"systemInstruction": {"parts": [{"functionResponse": {"name": "f"}}]}},
    ),
    (GOOGLE, "top_k", {"generationConfig": {"topK": 1.5}}),
    (GOOGLE, "response_schema", {"generationConfig": {"responseSchema": {"type": "STRING"}}}),
    (GOOGLE, "tools[0]", {"tools": [{"x" * 100_000: {}}]}),
    (GOOGLE, "mode", {"toolConfig": {"functionCallingConfig": {"mode": "x" * 100_000}}}),
    (
        GOOGLE,
        "function_calling_config",
        {"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["x" * 100_000]}}},
    ),
    ("/v1/models/nobody:generateContent", "nobody", {}),
]


@pytest.mark.parametrize(("path", "name", "change"), NESTED, ids=lambda value: str(value)[:60])
def test_what_is_wrong_inside_a_field_is_named(
    refusing_plane: planes.ServedPlane, path: str, name: str, change: dict[str, Any]
) -> None:
    status, sentence = ask(refusing_plane, path, REQUESTS.get(path, {}) | change)
    assert status in (400, 404)
    refusals.check_sentence(sentence, name)


MANY = [
    {**planes.CALC, "function": {**planes.CALC["function"], "name": f"f{i}"}} for i in range(MAX_TOOLS + 1)
]
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": {"name": "calc"}}] * 2000}}
VAST = {"type": "object", "description": "x" * (MAX_TOOLS_BYTES + 1)}
STOPS = [str(i) for i in range(MAX_STOPS + 1)]
OPTIONS = {"x": "y" * 70_000}
TOO_MANY: list[tuple[str, str, str, dict[str, Any]]] = [
    (CHAT, "tools must have at most 1024 tools, got 1025", "tools", {"tools": MANY}),
    (CHAT, "at most 1024 names of allowed functions, got 2000", "tool_choice", {"tool_choice": ALLOWED}),
    (CHAT, "at most 64 stop strings, got 65", "stop", {"stop": STOPS}),
    (CHAT, "strings of at most 1024 characters, got 2000", "stop", {"stop": "x" * 2000}),
    (CHAT, "at most 65536 bytes as JSON", "chat_template_kwargs", {"chat_template_kwargs": OPTIONS}),
    (
        CHAT,
        "at most 2097152 bytes as JSON",
        "tools",
        {"tools": [{"function": {"name": "f", "parameters": VAST}}]},
    ),
    (COMPLETIONS, "at most 64 stop strings", "stop", {"stop": STOPS}),
    (
        RESPONSES,
        "at most 1024 tools",
        "tools",
        {"tools": [{"type": "function", **planes.CALC["function"]}] * 1025},
    ),
    (RESPONSES, "at most 262144 bytes as JSON", "metadata", {"metadata": {"x": "y" * 300_000}}),
    (RESPONSES, "at most 1048576 bytes as JSON", "instructions", {"instructions": "y" * 2_000_000}),
    (
        RESPONSES,
        "at most 1024 item references",
        "input",
        {"input": [{"type": "item_reference", "id": "msg_x.0.0.1"}] * 1025},
    ),
    (MESSAGES, "at most 1024 tools", "tools", {"tools": [TOOL] * 1025}),
    (MESSAGES, "at most 64 stop strings", "stop_sequences", {"stop_sequences": STOPS}),
    (
        GOOGLE,
        "at most 1024 functions",
        "tools",
        {"tools": [{"functionDeclarations": [{"name": "f"}] * 1025}]},
    ),
    (GOOGLE, "at most 1024 entries", "tools", {"tools": [{"functionDeclarations": []}] * 1025}),
    (GOOGLE, "at most 64 stop strings", "stopSequences", {"stopSequences": STOPS}),
    (GOOGLE, "at most 131072 values", "request body", {"contents": [[]] * 140_000}),
    (CHAT, "at most 131072 values", "request body", {"metadata": [0] * 140_000}),
    (
        CHAT,
        "at most 131072 values",
        "arguments of the tool calls",
        {"messages": [*HI, {"role": "assistant", "tool_calls": [_call([0] * 70_000)] * 2}]},
    ),
]


@pytest.mark.parametrize(("path", "limit", "name", "change"), TOO_MANY, ids=lambda value: str(value)[:40])
def test_a_limit_names_what_is_too_much(
    refusing_plane: planes.ServedPlane, path: str, limit: str, name: str, change: dict[str, Any]
) -> None:
    status, sentence = ask(refusing_plane, path, REQUESTS[path] | change)
    assert status == 400
    refusals.check_sentence(sentence, limit, name.replace("stopSequences", "stop_sequences"))


OVERFLOWS = {
    CHAT: (
        "maximum context length is 2048 tokens",
        {"messages": [{"role": "user", "content": "hello " * 10**6}]},
    ),
    COMPLETIONS: ("maximum context length is 2048 tokens", {"prompt": "hello " * 10**6}),
    RESPONSES: ("maximum context length is 2048 tokens", {"input": "hello " * 10**6}),
    MESSAGES: ("tokens > 2047 maximum", {"messages": [{"role": "user", "content": "hello " * 10**6}]}),
    GOOGLE: ("2047", {"contents": [{"parts": [{"text": "hello " * 10**6}]}]}),
}


@pytest.mark.parametrize("path", OVERFLOWS)
def test_what_cannot_fit_is_an_overflow_in_the_words_of_its_provider(
    refusing_plane: planes.ServedPlane, path: str
) -> None:
    words, change = OVERFLOWS[path]
    for given in (change, {"prompt": [7] * 200_000} if path == COMPLETIONS else change):
        content = json.dumps(REQUESTS[path] | given).encode()
        response = refusing_plane.http.post(path, content=content)
        assert response.status_code == 400 and words in response.json()["error"]["message"]


RUN = "/runs/run"
CONTROL: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/runs", {}, 400, "run_id"),
    ("POST", "/runs", [], 400, "body"),
    ("POST", "/runs", b"\xff", 400, "JSON"),
    ("POST", "/runs", b"[" * 5000, 400, "JSON"),
    ("POST", "/runs", {"run_id": "../x"}, 400, "run_id"),
    ("POST", "/sessions", {"run_id": "../x"}, 400, "run_id"),
    ("POST", "/sessions", {"run_id": "run", "policy": "x" * 100_000}, 404, "model"),
    ("POST", "/sessions", {"run_id": "run", "typo": 1}, 400, "typo"),
    ("POST", "/sessions", {"run_id": "run", "metadata": []}, 400, "metadata"),
    ("POST", "/sessions", {"run_id": "run", "metadata": {"x": 10**30}}, 400, "64 bits"),
    ("POST", "/sessions", {"run_id": "run", "metadata": {"x": "y" * 70_000}}, 400, "65536 bytes"),
    ("POST", "/sessions", {"run_id": "run", "metadata": {"x": [0] * 140_000}}, 400, "131072 values"),
    ("POST", "/sessions/nobody/reward", {"reward": 1}, 404, "nobody"),
    ("POST", "/sessions/nobody/finish", {"status": "finished"}, 404, "nobody"),
    ("POST", "/sessions/nobody/finish", {"status": "done"}, 400, "status"),
    ("POST", "/sessions/nobody/reward", {"reward": "much"}, 404, "nobody"),
    ("GET", "/sessions/nobody", None, 404, "nobody"),
    ("GET", "/sessions/nobody/v1/models", None, 404, "nobody"),
    ("POST", f"{RUN}/finished", {"sessions": [{"status": "finished"}]}, 400, "sessions.0.session_id"),
    ("POST", f"{RUN}/claim", {"runner": "a", "max": -1}, 400, "max"),
    ("POST", f"{RUN}/claim", {"runner": "a"}, 400, "max"),
    ("POST", "/runs/nobody/claim", {"runner": "a", "max": 1}, 404, "nobody"),
    ("GET", "/runs/nobody", None, 404, "nobody"),
    ("GET", "/runs/two%0Alines", None, 404, "two lines"),
    ("POST", f"{RUN}/evaluations/0", {"num_tasks": 10**12}, 400, "num_tasks"),
    ("POST", f"{RUN}/claim", {"runner": "a", "max": 10**12}, 400, "max"),
    ("GET", f"{RUN}/batches/{10**30}", None, 404, "2147483647"),
    ("GET", f"{RUN}/batches/0?wait_s=long", None, 400, "wait_s"),
    ("GET", f"{RUN}/batches/0?wait_s=nan", None, 400, "wait_s"),
    ("GET", f"{RUN}/batches/x", None, 404, "/runs/run/batches/x"),
    ("POST", f"{RUN}/batches/0/seal", {"attempt": 1}, 409, "batch 0"),
    ("POST", f"{RUN}/batches/0/seal", {"attempt": 0}, 409, "Attempt 0"),
    ("POST", f"{RUN}/batches/0/seal", {"attempt": "x"}, 400, "attempt"),
    ("POST", f"{RUN}/evaluations/0", {"num_tasks": 0}, 400, "num_tasks"),
    ("GET", f"{RUN}/evaluations/7", None, 404, "version 7"),
    ("POST", f"{RUN}/evaluations/7/seal", {"attempt": 1}, 409, "version 7"),
    ("POST", f"{RUN}/weights", {"version": -1, "uri": "x"}, 400, "version"),
    ("POST", f"{RUN}/leases/r0/revoke", {"within_s": 0}, 400, "within_s"),
    ("POST", f"{RUN}/pause", {"mode": "stop"}, 400, "mode"),
    ("POST", f"{RUN}/pause", {"engine": "nobody"}, 404, "nobody"),
    ("POST", f"{RUN}/engines/nobody/drain", {}, 404, "nobody"),
    ("POST", f"{RUN}/release", {"attempt": "x"}, 400, "attempt"),
    ("POST", f"{RUN}/stage", {"iteration": "x", "stage": "train"}, 400, "iteration"),
    ("GET", "/nowhere", None, 404, "/nowhere"),
    ("GET", "/" + "x" * 10_000, None, 404, "GET"),
    ("GET", CHAT, None, 405, CHAT),
    ("PATCH", "/runs", {}, 405, "/runs"),
    ("GET", "/v1/models/nobody", None, 404, "nobody"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "name"), CONTROL, ids=lambda value: str(value)[:40]
)
def test_a_control_route_names_what_is_wrong(
    refusing_plane: planes.ServedPlane, method: str, path: str, body: Any, status: int, name: str
) -> None:
    got, sentence = ask(refusing_plane, path, body, method)
    assert got == status, sentence
    refusals.check_sentence(sentence, name)


@pytest.mark.parametrize(("field", "limit"), [("reward_parts", MAX_PARTS), ("step_rewards", MAX_STEPS)])
def test_a_reward_has_so_many_entries(refusing_plane: planes.ServedPlane, field: str, limit: int) -> None:
    session = refusing_plane.post("/sessions", {"run_id": "run"})["session_id"]
    body = {"reward": 1, field: {str(i): 1 for i in range(limit + 1)}}
    status, sentence = ask(refusing_plane, f"/sessions/{session}/reward", body)
    assert status == 400
    refusals.check_sentence(sentence, field, f"at most {limit} entries, got {limit + 1}")


REGISTERED: list[tuple[str, Any]] = [
    ("run_id", "../x"),
    ("model_dir", "/nowhere"),
    ("run_dir", 5),
    ("run_dir", "nosuch://x"),
    ("seed", "x"),
    ("group_size", 0),
    ("group_size", 2**16 + 1),
    ("groups_per_batch", 2**16 + 1),
    ("max_tokens", 0),
    ("temperature", -1),
    ("top_p", 2),
    ("session_timeout_s", 0),
    ("done_groups", ["x"]),
    ("key", "short"),
    ("typo", 1),
]


@pytest.mark.parametrize(("field", "value"), REGISTERED, ids=lambda value: str(value))
def test_a_run_that_cannot_be_served_is_refused(
    refusing_plane: planes.ServedPlane, field: str, value: Any
) -> None:
    folders = {"run_dir": str(refusing_plane.run_dir / "other"), "model_dir": refusing_plane.model_dir}
    spec = specs.changed(specs.SPEC | folders | {"run_id": "other"}, **{field: value})
    status, sentence = ask(refusing_plane, "/runs", spec)
    assert status == 400
    refusals.check_sentence(sentence, value if field == "model_dir" else field)
    assert "short" not in sentence
    assert not (refusing_plane.run_dir / "other").exists()
