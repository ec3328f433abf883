"""Calls of Llama 3: JSON objects, separated by `;`, that are the whole answer."""

from __future__ import annotations

from collections.abc import Callable

from sf_core.dataplane.chat.calls.json_calls import json_end, open_call, read_call, render_call
from sf_core.dataplane.chat.tool_formats import Parts, ToolCall, ToolFormat, name_of

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = "; \t\r\n"


class LeadingCalls:
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
            if (end := json_end(self._text, at)) is None:
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


LLAMA3_JSON = ToolFormat(
    lambda tools: LeadingCalls(lambda text: read_call(text, tools, "parameters", "arguments")),
    lambda call: render_call(call, "parameters"),
    lambda tool: open_call(tool, "parameters"),
    (PYTHON_TAG,),
    lambda tool: {
        "type": "object",
        "properties": {"name": {"const": name_of(tool)}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    },
)
