"""Calls of Hermes 2 Pro, Qwen 2.5 and Qwen3: JSON between tags."""

from __future__ import annotations

from sf_core.dataplane.chat.calls.base import CALL_END, CALL_START, MarkedCalls, read_between_tags
from sf_core.dataplane.chat.calls.json_calls import begin_call, read_call, render_call
from sf_core.dataplane.chat.tool_formats import CallSplitter, Tool, ToolFormat


def _make_splitter(tools: list[Tool]) -> CallSplitter:
    return MarkedCalls(
        read_between_tags(lambda text: read_call(text, tools, "arguments"), shows_end=True), CALL_START
    )


HERMES = ToolFormat(
    _make_splitter,
    lambda call: f"{CALL_START}\n{render_call(call, 'arguments')}\n{CALL_END}",
    lambda tool: f"{CALL_START}\n{begin_call(tool, 'arguments')}",
    (CALL_START, CALL_END),
)
