"""The interface of a format of tool calls: calls are found in sampled text, rendered, and forced.

The formats themselves are in `calls`. A call that does not parse, cannot be written again or names an unknown
tool stays text and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Tool = dict[str, Any]
"""A tool as OpenAI clients send it: {"type": "function", "function": {"name", "parameters", ...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


Parts = list[str | ToolCall]


class CallSplitter(Protocol):
    """Splits text, as it arrives, into text and calls. Its methods return, in order, the parts that later
    text cannot change."""

    num_unparsed: int
    """Number of calls that stayed text."""

    def push(self, text: str) -> Parts: ...

    def finish(self) -> Parts: ...


class ToolFormat(NamedTuple):
    splitter: Callable[[list[Tool]], CallSplitter]
    render: Callable[[ToolCall], str]
    """The text of one call."""
    opening: Callable[[Tool | None], str]
    """The beginning of an answer that must call this tool (None: any tool). Except in `plain`, it ends
    neither with a space nor with `{`, because pretrained models write these in one token with the next
    text."""
    marks: tuple[str, ...]
    """Texts by which calls are recognised. The first mark begins a call, even inside unfinished reasoning."""
    schema: Callable[[Tool], dict[str, Any]] | None = None
    """The JSON Schema of a call that is the whole answer; None: calls begin with a mark."""


def tool_name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def tool_parameters(name: str, tools: list[Tool]) -> dict[str, Any] | None:
    """Properties of a tool's schema; None if there is no such tool."""
    for tool in tools:
        if tool_name(tool) == name:
            return dict((tool["function"].get("parameters") or {}).get("properties") or {})
    return None


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`.

    >>> overlap("so <tool", "<tool_call>")
    5
    """
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
