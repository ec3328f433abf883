"""The OpenAI Chat Completions dialect, inwards: request body -> canonical request.

Owns validation. Knows nothing of sessions, engines or sockets; answers are shaped in chat_response.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.messages import Message, tool_call
from sf_core.dataplane.toolcalls import Tool

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What any dialect asks for, in canonical form."""

    model: str
    messages: list[Message]
    tools: list[Tool]
    """As they are rendered."""
    parse_tool_calls: bool
    stop: list[str]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool


def parse_request(data: bytes) -> ChatRequest:
    """Raises ApiError with status 400 and a sentence that says what is wrong."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The request body must be a JSON object, got {_kind(body)}")
    _refuse_unsupported(body)
    tools = _parse_tools(body.get("tools"))
    tool_choice = _get(body, "tool_choice", (str, dict), "auto")
    if tool_choice not in ("auto", "none"):
        raise ApiError(
            400, 'tool_choice must be "auto" or "none"; a call cannot be forced', param="tool_choice"
        )
    stop = _get(body, "stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) and text for text in stop):
        raise ApiError(400, "stop must be a non-empty string or a list of them", param="stop")
    max_tokens = _get(body, "max_completion_tokens", (int,), _get(body, "max_tokens", (int,), None))
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    return ChatRequest(
        model=_get(body, "model", (str,), ""),
        messages=_parse_messages(body.get("messages")),
        tools=tools,
        parse_tool_calls=bool(tools) and tool_choice == "auto",
        stop=stop,
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        seed=_get(body, "seed", (int,), None),
        stream=_get(body, "stream", (bool,), False),
        include_usage=bool(_get(body, "stream_options", (dict,), {}).get("include_usage")),
        logprobs=_get(body, "logprobs", (bool,), False),
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    """What would change the answer and cannot be done is refused, never ignored. Penalties are not among
    it: like temperature, they are the run's to decide."""
    if body.get("n") not in (None, 1):
        raise ApiError(400, f"n must be 1, got {body['n']}: send the request again instead", param="n")
    if body.get("top_logprobs"):
        raise ApiError(400, "top_logprobs is not supported; logprobs is", param="top_logprobs")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise ApiError(400, "response_format must be text", param="response_format")


def _parse_tools(tools: Any) -> list[Tool]:
    if not tools:
        return []
    if not isinstance(tools, list):
        raise ApiError(400, f"tools must be a list, got {_kind(tools)}", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{i}] must be a function with a name", param=f"tools[{i}]")
    return tools


def _parse_messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    canonical: list[Message] = []
    open_calls: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param=where)
        parsed = _parse_message(message, where)
        if parsed["role"] == "assistant":
            open_calls = {call["id"] for call in parsed.get("tool_calls", [])}
        elif parsed["role"] == "tool":
            if parsed["tool_call_id"] not in open_calls:
                raise ApiError(
                    400, f"{where} answers no tool call of the preceding assistant message", param=where
                )
        else:
            open_calls = set()
        canonical.append(parsed)
    return canonical


def _parse_message(message: dict[str, Any], where: str) -> Message:
    """Canonical form: only what a model can see, and equal for messages that mean the same."""
    parsed: Message = {"role": message["role"], "content": _content(message.get("content"), where)}
    if message["role"] == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls must be a list, got {_kind(calls)}", param=where)
        parsed["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if message["role"] == "tool":
        parsed["tool_call_id"] = message.get("tool_call_id")
    if isinstance(message.get("name"), str):
        parsed["name"] = message["name"]
    return parsed


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
        raise ApiError(
            400, f"{where}.content has a part that is not text; only text is supported", param=where
        )
    raise ApiError(
        400, f"{where}.content must be a string or a list of parts, got {_kind(content)}", param=where
    )


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where} must have an id and a function with a name", param=where)
    arguments = function.get("arguments") or "{}"
    try:
        # templates take a mapping; two spellings of the same JSON are the same call
        arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        raise ApiError(400, f"{where}.function.arguments is not valid JSON", param=where) from None
    return tool_call(str(call.get("id")), function["name"], arguments)


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = _get(body, name, (int, float), default)
    if not low <= value <= high:
        raise ApiError(400, f"{name} must be between {low:g} and {high:g}, got {value}", param=name)
    return float(value)


def _get(body: dict[str, Any], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    # bool is an int in Python but not in JSON
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ApiError(
            400, f"{name} must be {' or '.join(_NAMES[k] for k in kinds)}, got {_kind(value)}", param=name
        )
    return value


_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _kind(value: Any) -> str:
    return "null" if value is None else _NAMES[type(value)]
