"""Tool calls inside sampled text: one parser and renderer per model family.

Owns the formats and the splitting of an answer into text and calls. A call that does not parse or names an
unknown tool stays text and is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

CALL_START, CALL_END = "<tool_call>", "</tool_call>"

Tool = dict[str, Any]
"""A tool as OpenAI clients send it: {"type": "function", "function": {"name", "parameters", ...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


class ToolFormat(NamedTuple):
    parse: Callable[[str, list[Tool]], ToolCall | None]
    """(text between the call marks, tools) -> the call, or None if it is none."""
    render: Callable[[ToolCall], str]
    """The text between the call marks."""


def _parse_hermes(text: str, tools: list[Tool]) -> ToolCall | None:
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict) or _parameters(call["name"], tools) is None:
        return None
    return ToolCall(call["name"], arguments)


def _render_hermes(call: ToolCall) -> str:
    return f"\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n"


def _parse_plain(text: str, tools: list[Tool]) -> ToolCall | None:
    name, _, argument = text.strip().partition(" ")
    parameters = _parameters(name, tools)
    if parameters is None:
        return None
    if not parameters:
        return None if argument else ToolCall(name, {})
    first, schema = next(iter(parameters.items()))
    return ToolCall(name, {first: _convert(argument, schema.get("type"))})


def _render_plain(call: ToolCall) -> str:
    return " ".join([call.name, *map(str, call.arguments.values())])


FORMATS = {
    "hermes": ToolFormat(_parse_hermes, _render_hermes),
    "plain": ToolFormat(_parse_plain, _render_plain),
}


def _parameters(name: str, tools: list[Tool]) -> dict[str, Any] | None:
    """Properties of a tool's schema; None if there is no such tool."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return dict((tool["function"].get("parameters") or {}).get("properties") or {})
    return None


def _convert(text: str, kind: str | None) -> Any:
    """The argument as a number if the schema wants one and it is one in JSON, else as text."""
    if kind in ("integer", "number"):
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        if isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool):
            return value
    return text


class AnswerStream:
    """Splits an answer, as its text arrives, into content and tool calls.

    `push` and `finish` return what became certain: pieces of content and whole calls, in order. Content
    that is nothing but white space around calls is dropped.
    """

    def __init__(self, tools: list[Tool], tool_format: str) -> None:
        self._tools, self._format = tools, FORMATS[tool_format]
        self._text = ""
        self._blank = ""
        """White space before any content: content only if more follows."""
        self.content = ""
        self.calls: list[ToolCall] = []
        self.num_unparsed = 0

    def push(self, text: str) -> list[str | ToolCall]:
        if not self._tools:
            return self._emit(text)
        self._text += text
        events: list[str | ToolCall] = []
        while (start := self._text.find(CALL_START)) >= 0:
            events += self._emit(self._text[:start])
            self._text = self._text[start:]
            end = self._text.find(CALL_END)
            if end < 0:
                return events
            whole, self._text = self._text[: end + len(CALL_END)], self._text[end + len(CALL_END) :]
            events += self._close_call(whole)
        certain = len(self._text) - overlap(self._text, CALL_START)
        events += self._emit(self._text[:certain])
        self._text = self._text[certain:]
        return events

    def finish(self) -> list[str | ToolCall]:
        self.num_unparsed += self._text.startswith(CALL_START)
        events = self._emit(self._text)
        if self._blank and not self.calls:
            self.content = self._blank
            events.append(self._blank)
        return events

    def _close_call(self, whole: str) -> list[str | ToolCall]:
        call = self._format.parse(whole[len(CALL_START) : -len(CALL_END)], self._tools)
        if call is None:
            self.num_unparsed += 1
            return self._emit(whole)
        self.calls.append(call)
        return [call]

    def _emit(self, text: str) -> list[str | ToolCall]:
        if not self.content:
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return []
        self.content += text
        return [text] if text else []


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Returns the text that certainly precedes any stop string."""
        text = self._held + text
        hits = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`.

    >>> overlap("so <tool", "<tool_call>")
    5
    """
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
