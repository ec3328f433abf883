"""Calls of GLM-4.5 and later GLM models: a name, and a tag for each key and each value."""

from __future__ import annotations

import re

from sf_core.dataplane.chat.calls.base import (
    CALL_END,
    CALL_START,
    MarkedCalls,
    format_value,
    parse_value,
    read_between_tags,
)
from sf_core.dataplane.chat.tool_formats import (
    CallSplitter,
    Tool,
    ToolCall,
    ToolFormat,
    tool_name,
    tool_parameters,
)

_KEY = "<arg_key>"
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _make_splitter(tools: list[Tool]) -> CallSplitter:
    def parse(text: str) -> ToolCall | None:
        start = text.find(_KEY) if _KEY in text else len(text)
        name = text[:start].strip()
        if (parameters := tool_parameters(name, tools)) is None:
            return None
        arguments = {}
        at = start
        while argument := _ARGUMENT.match(text, at):
            key = argument[1].strip()
            arguments[key] = parse_value(argument[2], parameters.get(key))
            at = argument.end()
        return ToolCall(name, arguments) if at == len(text) else None

    return MarkedCalls(read_between_tags(parse), CALL_START)


def _render(call: ToolCall) -> str:
    arguments = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{format_value(value)}</arg_value>\n"
        for key, value in call.arguments.items()
    )
    return f"{CALL_START}{call.name}\n{''.join(arguments)}{CALL_END}"


GLM45 = ToolFormat(
    _make_splitter,
    _render,
    lambda tool: CALL_START if tool is None else f"{CALL_START}{tool_name(tool)}\n",
    (CALL_START, CALL_END, _KEY, "</arg_key>", "<arg_value>", "</arg_value>"),
)
