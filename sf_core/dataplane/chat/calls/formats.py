"""The formats by name, and the one in which the chat template of a model folder writes calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import jinja2

from sf_core.dataplane.chat.calls.glm45 import GLM45
from sf_core.dataplane.chat.calls.hermes import HERMES
from sf_core.dataplane.chat.calls.llama3_json import LLAMA3_JSON
from sf_core.dataplane.chat.calls.mistral import MISTRAL, MISTRAL_LIST, MISTRAL_NAMED
from sf_core.dataplane.chat.calls.plain import PLAIN
from sf_core.dataplane.chat.calls.qwen3_coder import QWEN3_CODER
from sf_core.dataplane.chat.messages import Message, tool_call
from sf_core.dataplane.chat.tool_formats import Parts, Tool, ToolCall, ToolFormat

FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "mistral": MISTRAL,
    "mistral_list": MISTRAL_LIST,
    "mistral_named": MISTRAL_NAMED,
    "plain": PLAIN,
}
"""Formats by their names. A name is the value of `tool_format` in tokenizer_config.json."""


def detect_format(render: Callable[[list[Message], list[Tool]], str]) -> str:
    """The name of the format that reads the calls which a template writes; empty if none does."""
    written = {num: _show_calls(render, _CALLS[:num]) for num in (1, 2)}
    texts = {num: text for num, text in written.items() if text is not None}
    matching = [
        name
        for name, form in FORMATS.items()
        if 1 in texts and all(_parses(form, text, _CALLS[:num]) for num, text in texts.items())
    ]
    # several formats may parse the text, so the one that would write it most alike is chosen
    return max(
        matching,
        key=lambda name: _common_prefix_length(FORMATS[name].render(_CALLS[0]), texts[1].lstrip()),
        default="",
    )


def _show_calls(render: Callable[[list[Message], list[Tool]], str], calls: list[ToolCall]) -> str | None:
    """The text that a template writes for calls and after them: the part in which the rendering of an answer
    with calls differs from the rendering of another answer. None if the template refuses calls."""
    tool_calls = [tool_call(f"abcdefgh{n}", call.name, call.arguments) for n, call in enumerate(calls)]
    results: list[Message] = [
        {"role": "tool", "content": "found", "tool_call_id": call["id"]} for call in tool_calls
    ]
    for is_last in (True, False):  # some templates refuse an answer at the end
        with_calls = [_USER, {"role": "assistant", "content": "", "tool_calls": tool_calls}]
        without = [_USER, {"role": "assistant", "content": _OTHER}]
        if not is_last:
            with_calls += results
            without.append(_USER)
        try:
            text = render(with_calls, [_TOOL])
            other = render(without, [_TOOL])
        except jinja2.TemplateError:
            continue
        start = _common_prefix_length(text, other)
        return text[start : len(text) - _common_prefix_length(text[start:][::-1], other[start:][::-1])]
    return None


def _common_prefix_length(text: str, other: str) -> int:
    """Number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _parses(form: ToolFormat, text: str, calls: list[ToolCall]) -> bool:
    splitter = form.splitter([_TOOL])
    parts: Parts = [*splitter.push(text), *splitter.finish()]
    parsed = [part for part in parts if isinstance(part, ToolCall) or part.strip()]
    while parsed and isinstance(parsed[-1], str):
        parsed.pop()
    # compared as texts, because equal numbers may be of two types
    return splitter.num_unparsed == 0 and repr(parsed) == repr(calls)


_OTHER = "\N{SNOWMAN}"
_USER: Message = {"role": "user", "content": "ask"}
_TYPES = {"text": "string", "count": "integer", "ratio": "number", "sure": "boolean"}
_TYPES |= {"some": "array", "more": "object"}
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": "d"} for name, kind in _TYPES.items()},
            "required": ["text"],
        },
    },
}
_TEXT = 'a "b" \\ <c>\nd'
_VALUES = {"text": _TEXT, "count": 3, "ratio": 0.5, "sure": True, "some": ["x", 2], "more": {"k": {}}}
_CALLS = [ToolCall("find", _VALUES), ToolCall("find", {"text": "12"})]
