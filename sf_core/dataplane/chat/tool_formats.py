"""Tool calls inside sampled text: one parser and renderer per model family.

Owns the formats: where calls stand in an answer, how one is written, and how the text of a forced one begins.
A call that does not parse, cannot be written again or names an unknown tool stays text and is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from sf_core.dataplane.chat.json_text import read_json

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

Tool = dict[str, Any]
"""A tool as OpenAI clients send it: {"type": "function", "function": {"name", "parameters", ...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


Parts = list[str | ToolCall]


class CallSplitter(Protocol):
    """Splits text, as it arrives, into text and calls; returns, in order, what later text cannot change."""

    num_unparsed: int
    """Number of calls that stayed text."""

    def push(self, text: str) -> Parts: ...

    def finish(self) -> Parts: ...


class ToolFormat(NamedTuple):
    splitter: Callable[[list[Tool]], CallSplitter]
    render: Callable[[ToolCall], str]
    """The text of one call."""
    opening: Callable[[Tool | None], str]
    """The beginning of an answer that must call this tool (None: any). No JSON opening ends with a space,
    because the tokens of trained models begin with theirs."""
    schema: Callable[[Tool], dict[str, Any]] | None = None
    """The JSON Schema of a call that is the whole answer; None: calls begin with a mark."""


class MarkedCalls:
    """Calls between `<tool_call>` and `</tool_call>`, anywhere in the answer."""

    def __init__(self, parse: Callable[[str], ToolCall | None]) -> None:
        self._parse = parse
        self._text = ""
        self.num_unparsed = 0

    def push(self, text: str) -> Parts:
        self._text += text
        parts: Parts = []
        while (start := self._text.find(CALL_START)) >= 0:
            parts.append(self._text[:start])
            self._text = self._text[start:]
            end = self._text.find(CALL_END)
            if end < 0:
                return parts
            whole, self._text = self._text[: end + len(CALL_END)], self._text[end + len(CALL_END) :]
            call = self._parse(whole[len(CALL_START) : -len(CALL_END)])
            self.num_unparsed += call is None
            parts.append(whole if call is None else call)
        certain = len(self._text) - overlap(self._text, CALL_START)
        parts.append(self._text[:certain])
        self._text = self._text[certain:]
        return parts

    def finish(self) -> Parts:
        self.num_unparsed += self._text.startswith(CALL_START)
        text, self._text = self._text, ""
        return [text]


class LeadingCalls:
    """Calls as JSON objects, separated by `;`, that are the whole answer."""

    def __init__(self, parse: Callable[[str], ToolCall | None]) -> None:
        self._parse = parse
        self._text = ""
        self._is_text = False
        self._has_calls = False
        self.num_unparsed = 0

    def push(self, text: str) -> Parts:
        if self._is_text:
            return [text]
        self._text += text
        parts: Parts = []
        while (at := self._call_start()) is not None:
            if "}" not in text:
                return parts
            try:
                _, end = _JSON.raw_decode(self._text, at)
            except (ValueError, RecursionError):
                return parts
            call = self._parse(self._text[at:end])
            self.num_unparsed += call is None
            self._has_calls |= call is not None
            parts.append(self._text[:end] if call is None else call)
            self._text = self._text[end:]
        head = self._text.lstrip(_BETWEEN)
        if not PYTHON_TAG.startswith(head):
            self._is_text = True
            parts += self.finish()
        return parts

    def finish(self) -> Parts:
        self.num_unparsed += self._call_start() is not None
        text, self._text = self._text, ""
        return [] if self._has_calls and not text.strip(_BETWEEN) else [text]

    def _call_start(self) -> int | None:
        head = self._text.lstrip(_BETWEEN).removeprefix(PYTHON_TAG).lstrip()
        return len(self._text) - len(head) if head.startswith("{") else None


_JSON = json.JSONDecoder()
_BETWEEN = "; \t\r\n"


def _json_call(text: str, tools: list[Tool], *keys: str) -> ToolCall | None:
    try:
        value = read_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict) or _parameters(value["name"], tools) is None:
        return None
    return ToolCall(value["name"], arguments)


def _render_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def _open_json(tool: Tool | None, key: str) -> str:
    return '{"name":' if tool is None else f'{{"name": {json.dumps(_name(tool))}, "{key}":'


def _split_hermes(tools: list[Tool]) -> CallSplitter:
    return MarkedCalls(lambda text: _json_call(text, tools, "arguments"))


def _split_plain(tools: list[Tool]) -> CallSplitter:
    def parse(text: str) -> ToolCall | None:
        name, _, argument = text.strip().partition(" ")
        parameters = _parameters(name, tools)
        if parameters is None:
            return None
        if not parameters:
            return None if argument else ToolCall(name, {})
        first, schema = next(iter(parameters.items()))
        return ToolCall(name, {first: _convert(argument, schema.get("type"))})

    return MarkedCalls(parse)


def _render_plain(call: ToolCall) -> str:
    return CALL_START + " ".join([call.name, *map(str, call.arguments.values())]) + CALL_END


def _open_plain(tool: Tool | None) -> str:
    if tool is None:
        return CALL_START
    return f"{CALL_START}{_name(tool)} " if _parameters(_name(tool), [tool]) else CALL_START + _name(tool)


FORMATS = {
    "hermes": ToolFormat(
        _split_hermes,
        lambda call: f"{CALL_START}\n{_render_json(call, 'arguments')}\n{CALL_END}",
        lambda tool: f"{CALL_START}\n{_open_json(tool, 'arguments')}",
    ),
    "llama3_json": ToolFormat(
        lambda tools: LeadingCalls(lambda text: _json_call(text, tools, "parameters", "arguments")),
        lambda call: _render_json(call, "parameters"),
        lambda tool: _open_json(tool, "parameters"),
        lambda tool: {
            "type": "object",
            "properties": {"name": {"const": _name(tool)}, "parameters": {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        },
    ),
    "plain": ToolFormat(_split_plain, _render_plain, _open_plain),
}
"""Formats by name, which is the `tool_format` in a model folder's tokenizer_config.json."""


def format_of(template: str) -> str:
    """The format of a chat template, for folders that do not name theirs."""
    return "llama3_json" if CALL_START not in template and '"parameters":' in template else "hermes"


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _parameters(name: str, tools: list[Tool]) -> dict[str, Any] | None:
    """Properties of a tool's schema; None if there is no such tool."""
    for tool in tools:
        if _name(tool) == name:
            return dict((tool["function"].get("parameters") or {}).get("properties") or {})
    return None


def _convert(text: str, kind: str | None) -> Any:
    """The argument as a number if the schema wants one and the text is one in JSON, else as text."""
    if kind in ("integer", "number"):
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        if isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool):
            return value
    return text


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`.

    >>> overlap("so <tool", "<tool_call>")
    5
    """
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
