"""Calls of Llama 3: JSON objects, separated by `;`, that are the whole answer."""

from __future__ import annotations

import re
from collections.abc import Callable

from sf_core.dataplane.chat.calls.json_calls import begin_call, find_json_end, read_call, render_call
from sf_core.dataplane.chat.tool_formats import Parts, ToolCall, ToolFormat, tool_name

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = "; \t\r\n"
_LATE = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')
"""The beginning of a call after other text. It is not parsed as a call, because the text may only describe
one."""


class LeadingCalls:
    def __init__(self, parse: Callable[[str], ToolCall | None]) -> None:
        self._parse = parse
        self._text = ""
        self._is_text = False
        """Whether the rest of the answer is text: no call can follow."""
        self._has_calls = False
        self.num_unparsed = 0

    def push(self, text: str) -> Parts:
        self._text += text
        if self._is_text:
            return [text]
        parts: Parts = []
        while (at := self._call_start()) is not None:
            if "}" not in text:
                return parts
            if (end := find_json_end(self._text, at)) is None:
                return parts
            call = self._parse(self._text[at:end])
            self.num_unparsed += call is None
            self._has_calls |= call is not None
            parts.append(self._text[:end] if call is None else call)
            self._text = self._text[end:]
        head = self._text.lstrip(_BETWEEN)
        if not PYTHON_TAG.startswith(head.rstrip()):
            self._is_text = True
            parts.append(self._text)
        return parts

    def finish(self) -> Parts:
        if self._is_text:
            self.num_unparsed += len(_LATE.findall(self._text))
            return []
        self.num_unparsed += self._call_start() is not None
        text = self._text
        self._text = ""
        return [] if self._has_calls and not text.strip(_BETWEEN) else [text]

    def _call_start(self) -> int | None:
        head = self._text.lstrip(_BETWEEN).removeprefix(PYTHON_TAG).lstrip()
        return len(self._text) - len(head) if head.startswith("{") else None


LLAMA3_JSON = ToolFormat(
    lambda tools: LeadingCalls(lambda text: read_call(text, tools, "arguments", "parameters")),
    lambda call: render_call(call, "parameters"),
    lambda tool: begin_call(tool, "parameters"),
    (PYTHON_TAG,),
    lambda tool: {
        "type": "object",
        "properties": {"name": {"const": tool_name(tool)}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    },
)
