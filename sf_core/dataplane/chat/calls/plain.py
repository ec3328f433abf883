"""Calls of the built-in models: a name and its first argument between tags."""

from __future__ import annotations

from typing import Any

from sf_core.dataplane.chat.calls.base import CALL_END, CALL_START, MarkedCalls, read_between_tags
from sf_core.dataplane.chat.json_text import read_json
from sf_core.dataplane.chat.tool_formats import (
    CallSplitter,
    Tool,
    ToolCall,
    ToolFormat,
    tool_name,
    tool_parameters,
)


def _make_splitter(tools: list[Tool]) -> CallSplitter:
    def parse(text: str) -> ToolCall | None:
        name, _, argument = text.strip().partition(" ")
        parameters = tool_parameters(name, tools)
        if parameters is None:
            return None
        if not parameters:
            return None if argument else ToolCall(name, {})
        first, schema = next(iter(parameters.items()))
        return ToolCall(name, {first: _convert(argument, schema.get("type"))})

    return MarkedCalls(read_between_tags(parse), CALL_START)


def _render(call: ToolCall) -> str:
    return CALL_START + " ".join([call.name, *map(str, call.arguments.values())]) + CALL_END


def _open(tool: Tool | None) -> str:
    if tool is None:
        return CALL_START
    space = " " if tool_parameters(tool_name(tool), [tool]) else ""
    return CALL_START + tool_name(tool) + space


def _convert(text: str, kind: str | None) -> Any:
    """The argument as a number, if the schema asks for a number and the text is a number in JSON; else as
    text."""
    if kind in ("integer", "number"):
        try:
            value = read_json(text)
        except ValueError:
            return text
        if isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool):
            return value
    return text


PLAIN = ToolFormat(_make_splitter, _render, _open, (CALL_START, CALL_END))
