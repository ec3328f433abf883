"""Calls of Mistral's models, behind `[TOOL_CALLS]`.

They are a JSON list or, since version 11 of the tokenizer, a name and arguments per call, with or without
`[ARGS]` between the two. All forms are parsed, whichever of them the template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sf_core.dataplane.chat.calls.base import MarkedCalls, ParsedCalls
from sf_core.dataplane.chat.calls.json_calls import (
    begin_call,
    call_from_object,
    find_json_end,
    read_object,
    render_call,
)
from sf_core.dataplane.chat.json_text import read_json
from sf_core.dataplane.chat.tool_formats import (
    CallSplitter,
    Tool,
    ToolCall,
    ToolFormat,
    tool_name,
    tool_parameters,
)

_START = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_MARKS = (_START, _ARGS, _CALL_ID)
_NAME = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]*)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=[{\[])")


def _make_splitter(tools: list[Tool]) -> CallSplitter:
    def read(text: str, is_whole: bool) -> ParsedCalls | None:
        head = _NAME.match(text)
        end = find_json_end(text, head.end()) if head else None
        if head and end is not None:
            written = text[head.end() : end]
            return ParsedCalls(
                end, _read_named(head[1], written, tools) if head[1] else _read_listed(written, tools)
            )
        if not is_whole:
            return None
        next_start = text.find(_START, 1)
        return ParsedCalls(next_start if next_start > 0 else len(text), None)

    return MarkedCalls(read, _START, closing="]}")


def _read_named(name: str, written: str, tools: list[Tool]) -> list[ToolCall] | None:
    arguments = read_object(written)
    if arguments is None or tool_parameters(name, tools) is None:
        return None
    return [ToolCall(name, arguments)]


def _read_listed(written: str, tools: list[Tool]) -> list[ToolCall] | None:
    try:
        value = read_json(written)
    except ValueError:
        return None
    calls = [
        call_from_object(_with_object_as_arguments(call), tools, "arguments")
        for call in (value if isinstance(value, list) else [value])
    ]
    valid_calls = [call for call in calls if call is not None]
    return valid_calls if valid_calls and len(valid_calls) == len(calls) else None


def _with_object_as_arguments(call: Any) -> Any:
    """The call with its arguments as an object. They may be written as a string, or be absent if the call has
    only a name."""
    if not isinstance(call, dict):
        return call
    if isinstance(written := call.get("arguments"), str):
        return call | {"arguments": read_object(written)}
    has_no_arguments = written is None and call.keys() <= {"name", "id", "arguments"}
    return call | {"arguments": {}} if has_no_arguments else call


def _render_named(between: str) -> Callable[[ToolCall], str]:
    return lambda call: f"{_START}{call.name}{between}{json.dumps(call.arguments, ensure_ascii=False)}"


def _open_named(between: str) -> Callable[[Tool | None], str]:
    return lambda tool: _START if tool is None else f"{_START}{tool_name(tool)}{between}"


MISTRAL_LIST = ToolFormat(
    _make_splitter,
    lambda call: f"{_START}[{render_call(call, 'arguments')}]",
    lambda tool: f"{_START}[{begin_call(tool, 'arguments')}",
    _MARKS,
)
MISTRAL = ToolFormat(_make_splitter, _render_named(_ARGS), _open_named(_ARGS), _MARKS)
MISTRAL_NAMED = ToolFormat(_make_splitter, _render_named(""), _open_named(""), _MARKS)
