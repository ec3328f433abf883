"""Calls of Qwen3-Coder and Qwen3.5: a tag for the tool, and a tag for each argument.

The text of an argument stands between line ends, which are not part of it. The tags around a call are
optional: models leave out the opening tag.
"""

from __future__ import annotations

import re

from sf_core.dataplane.chat.calls.base import (
    CALL_END,
    CALL_START,
    MarkedCalls,
    ParsedCalls,
    format_value,
    parse_value,
)
from sf_core.dataplane.chat.tool_formats import (
    CallSplitter,
    Tool,
    ToolCall,
    ToolFormat,
    overlap,
    tool_name,
    tool_parameters,
)

_START = "<function="
_END = "</function>"
_NAME = re.compile(r"<function=([^<>]*)>\s*")
_ARGUMENT = re.compile(r"<parameter=([^<>]+)>(.*?)(?:</parameter>\s*|(?=<parameter=))", re.DOTALL)


def _make_splitter(tools: list[Tool]) -> CallSplitter:
    def read(text: str, is_whole: bool) -> ParsedCalls | None:
        is_tagged = text.startswith(CALL_START)
        start = len(CALL_START) if is_tagged else 0
        end = text.find(CALL_END if is_tagged else _END)
        if end >= 0 and is_tagged:
            return ParsedCalls(end + len(CALL_END), _read_all(text[start:end], tools))
        if end >= 0:
            return _read_untagged(text, end + len(_END), is_whole, tools)
        if not is_whole:
            return None
        # the answer may end inside the closing tag
        end = len(text) - overlap(text, CALL_END)
        return ParsedCalls(len(text), _read_all(text[start:end], tools))

    return MarkedCalls(read, CALL_START, _START)


def _read_untagged(text: str, end: int, is_whole: bool, tools: list[Tool]) -> ParsedCalls | None:
    """A call without its opening tag, up to `end`; the closing tag may follow."""
    remaining = text[end:].lstrip()
    if remaining.startswith(CALL_END):
        end_of_tag = len(text) - len(remaining) + len(CALL_END)
        return ParsedCalls(end_of_tag, _read_all(text[:end], tools))
    if CALL_END.startswith(remaining) and not is_whole:
        return None
    return ParsedCalls(end, _read_all(text[:end], tools))


def _read_all(text: str, tools: list[Tool]) -> list[ToolCall] | None:
    """The calls of a text that consists only of calls; None if it does not."""
    *texts, remaining = text.split(_END)
    if not texts or remaining.strip():
        return None
    calls: list[ToolCall] = []
    for written in texts:
        call = _read(written.strip().removeprefix(CALL_START).lstrip(), tools)
        if call is None:
            return None
        calls.append(call)
    return calls


def _read(text: str, tools: list[Tool]) -> ToolCall | None:
    name = _NAME.match(text)
    if name is None or (parameters := tool_parameters(name[1], tools)) is None:
        return None
    arguments = {}
    at = name.end()
    while argument := _ARGUMENT.match(text, at):
        value = argument[2].removeprefix("\n").removesuffix("\n")
        arguments[argument[1]] = parse_value(value, parameters.get(argument[1]))
        at = argument.end()
    return ToolCall(name[1], arguments) if at == len(text) else None


def _render(call: ToolCall) -> str:
    arguments = (
        f"<parameter={key}>\n{format_value(value)}\n</parameter>\n" for key, value in call.arguments.items()
    )
    return f"{CALL_START}\n{_START}{call.name}>\n{''.join(arguments)}{_END}\n{CALL_END}"


QWEN3_CODER = ToolFormat(
    _make_splitter,
    _render,
    lambda tool: f"{CALL_START}\n{_START}" + ("" if tool is None else f"{tool_name(tool)}>\n"),
    (CALL_START, CALL_END),
)
