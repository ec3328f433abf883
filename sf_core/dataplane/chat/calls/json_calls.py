"""Calls that are JSON objects: {"name": "find", "arguments": {"x": 1}}."""

from __future__ import annotations

import json
from typing import Any

from sf_core.dataplane.chat.json_text import read_json
from sf_core.dataplane.chat.tool_formats import Tool, ToolCall, tool_name, tool_parameters

_JSON = json.JSONDecoder()


def find_json_end(text: str, start: int) -> int | None:
    """End of the JSON value that begins at `start`; None if it does not end, or is not JSON."""
    try:
        return _JSON.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def read_object(text: str) -> dict[str, Any] | None:
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_call(text: str, tools: list[Tool], *keys: str) -> ToolCall | None:
    """The call in a text; None if the text is not a call. `keys`: names of the field with the arguments, of
    which the first that is present counts."""
    return call_from_object(read_object(text), tools, *keys)


def call_from_object(value: Any, tools: list[Tool], *keys: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in keys if key in value), None)
    if not isinstance(arguments, dict) or tool_parameters(value["name"], tools) is None:
        return None
    return ToolCall(value["name"], arguments)


def render_call(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def begin_call(tool: Tool | None, key: str) -> str:
    return '{"name":' if tool is None else f'{{"name": {json.dumps(tool_name(tool))}, "{key}":'
