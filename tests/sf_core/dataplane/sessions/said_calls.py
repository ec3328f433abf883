"""Answers with calls, as clients of each dialect send them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from sf_core.dataplane.gateway.dialects.anthropic import Anthropic
from sf_core.dataplane.gateway.dialects.chat import Chat
from sf_core.dataplane.gateway.dialects.google import Google
from sf_core.dataplane.gateway.dialects.protocol import Dialect
from sf_core.dataplane.gateway.dialects.responses import Responses

Said = tuple[str, int, str]
"""Id of a call, its argument, and its result."""


def chat(said: Sequence[Said]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "start"}]
    for call_id, x, result in said:
        function = {"name": "find", "arguments": json.dumps({"x": x})}
        call = {"id": call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    function = {"name": "find", "parameters": {"type": "object"}}
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


def responses(said: Sequence[Said]) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "start"}]
    for call_id, x, result in said:
        call = {"call_id": call_id, "name": "find", "arguments": json.dumps({"x": x})}
        items.append({"type": "function_call", **call})
        items.append({"type": "function_call_output", "call_id": call_id, "output": result})
    return {"input": items, "tools": [{"type": "function", "name": "find"}]}


def anthropic(said: Sequence[Said]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "start"}]
    for call_id, x, result in said:
        call = {"type": "tool_use", "id": call_id, "name": "find", "input": {"x": x}}
        messages.append({"role": "assistant", "content": [call]})
        found = {"type": "tool_result", "tool_use_id": call_id, "content": result}
        messages.append({"role": "user", "content": [found]})
    return {"messages": messages, "tools": [{"name": "find"}], "max_tokens": 8}


def google(said: Sequence[Said]) -> dict[str, Any]:
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "start"}]}]
    for call_id, x, result in said:
        call = {"id": call_id, "name": "find", "args": {"x": x}}
        contents.append({"role": "model", "parts": [{"function_call": call}]})
        found = {"id": call_id, "name": "find", "response": {"output": result}}
        contents.append({"role": "user", "parts": [{"function_response": found}]})
    return {"contents": contents, "tools": [{"function_declarations": [{"name": "find"}]}]}


DIALECTS: list[tuple[Dialect, Callable[[Sequence[Said]], dict[str, Any]]]] = [
    (Chat(), chat),
    (Responses(), responses),
    (Anthropic(), anthropic),
    (Google(), google),
]
