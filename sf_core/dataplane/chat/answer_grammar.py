"""The grammar of answers whose content follows a JSON Schema, in llguidance's Lark.

An answer may think first, as without a schema, and may call tools instead. JSON is on one line: a policy that
may write white space anywhere can write it for ever.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from llguidance import LLMatcher

from sf_core.dataplane.chat.answer_parser import THINK_END, THINK_START
from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import Tool, ToolFormat
from sf_core.dataplane.errors import ApiError

Schema = dict[str, Any] | bool

MAX_SCHEMA_BYTES = 65536

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def answer_grammar(schema: Schema, tools: list[Tool], renderer: Renderer) -> str:
    """`tools` are the tools that may be called. Raises ApiError if the schema cannot be followed."""
    text = msgspec.json.encode(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise ApiError(
            400, f"The schema of the answer has {len(text)} bytes; the limit is {MAX_SCHEMA_BYTES} bytes."
        )
    if fault := _find_fault(text):
        raise ApiError(400, f"The schema of the answer cannot be used: {fault}")
    return "\n".join(_grammar_rules(schema, tools, renderer))


def _grammar_rules(schema: Schema, tools: list[Tool], renderer: Renderer) -> Iterator[str]:
    marks = renderer.control_tokens
    thinking = ""
    if renderer.thinks:
        start = _literal(THINK_START, marks)
        thinking = "thought BLANK?" if renderer.opens_thinking else f"({start} thought BLANK?)?"
        yield (
            f"thought: TEXT {_literal(THINK_END, marks)}"
            if THINK_END in marks
            else f"thought[suffix={json.dumps(THINK_END)}]: TEXT"
        )
        yield "TEXT: /(?s:.*)/"
        yield r"BLANK: /[ \n]{1,2}/"
    calls = [_call_rule(FORMATS[renderer.tool_format], tool, marks) for tool in tools]
    yield f"start: {thinking} (content{''.join(f' | call_{n}' for n in range(len(calls)))})"
    yield from (f"call_{n}: {call}" for n, call in enumerate(calls))
    if calls:
        yield "anything: <[*]>*"
    yield f"content: {_json_rule(schema)}"


def _call_rule(form: ToolFormat, tool: Tool, marks: dict[str, int]) -> str:
    return _json_rule(form.schema(tool)) if form.schema else f"{_literal(form.opening(tool), marks)} anything"


def _json_rule(schema: Schema) -> str:
    rules = schema if isinstance(schema, dict) else {}
    return f"%json {json.dumps(rules | {'x-guidance': _ONE_LINE})}"


def _literal(text: str, marks: dict[str, int]) -> str:
    """The grammar's literal of a text, in which marks that are control tokens stand for these tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, sorted(marks)))})", text) if marks else [text]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part)


@functools.lru_cache(maxsize=256)
def _find_fault(schema: bytes) -> str:
    """Why a schema cannot be followed, in the words of llguidance; empty if it can."""
    fault = str(LLMatcher.validate_grammar(f"start: %json {schema.decode()}"))
    sentence = fault.partition("\n   1 | ")[0].rpartition("failed to compile JSON schema: ")[2]
    return " ".join(sentence.split())
