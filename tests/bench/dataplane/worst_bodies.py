"""Bodies that cost as much as a body of the largest size can, made from bodies that have all fields.

`WHOLE` has requests of each dialect that together have every field that the dialect reads. Each place in
them is filled with `FILLERS`, and each list is made as long as it may be. A test fails if a dialect reads a
field that no body of `WHOLE` has, so that a new field gets its worst bodies too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sf_core.dataplane.chat.json_text import MAX_VALUES
from sf_core.dataplane.gateway.endpoint import MAX_BODY_BYTES

Body = dict[str, Any]
Place = tuple[str | int, ...]
"""Names and indices that lead to a value."""

ROOM = 2**15
"""Bytes that a body has besides its filler."""

NUM_BYTES = MAX_BODY_BYTES - ROOM
NUM_VALUES = MAX_VALUES - 2**10

LINE = "the log says 12 errors at /usr/lib/x.py:30\n"
FITTING = LINE * (900_000 // len(LINE))
"""A text that just fits into a window of 2**20 tokens."""


def _list(values: Iterator[str]) -> bytes:
    return f"[{','.join(values)}]".encode()


FILLERS: dict[str, Callable[[], bytes]] = {
    "text": lambda: json.dumps(LINE * (NUM_BYTES // (len(LINE) + 1))).encode(),
    "escapes": lambda: json.dumps('\n"\\\t' * (NUM_BYTES // 8)).encode(),
    "halves": lambda: json.dumps("\ud83d" * (NUM_BYTES // 6)).encode(),
    "fitting": lambda: json.dumps(FITTING).encode(),
    "strings": lambda: _list(f'"{i:07}"' for i in range(NUM_VALUES)),
    "objects": lambda: _list('{"type":"text","text":"a","role":"user"}' for _ in range(NUM_VALUES // 5)),
    "lists": lambda: _list("[]" for _ in range(NUM_VALUES // 2)),
    "numbers": lambda: _list(str(1 + i % 300) for i in range(NUM_VALUES)),
    "names": lambda: f"{{{','.join(f'{chr(34)}{i:07}{chr(34)}:1.5' for i in range(NUM_VALUES))}}}".encode(),
}
"""JSON values, as large as a body has room for or as its number of values allows."""

filler = functools.cache(lambda name: FILLERS[name]())

HI = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"expression": "1"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}
SCHEMA: Body = {"type": "object"}
CALC: Body = {"type": "function", "function": {"name": "calc", "description": "d", "parameters": SCHEMA}}
FUNCTION: Body = CALC["function"] | {"strict": True, "defer_loading": False}
LIMITS: Body = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "stream": False,
    "chat_template_kwargs": {"x": 1},
}

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
GOOGLE = "/v1/models/policy:generateContent"
COUNTS = {MESSAGES: "/v1/messages/count_tokens", GOOGLE: "/v1/models/policy:countTokens"}
"""The routes that count the tokens of such a request."""

WHOLE: dict[str, list[Body]] = {
    CHAT: [
        {
            "model": "policy",
            "messages": [
                {"role": "system", "content": "be", "name": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": "a", "reasoning": "r", "tool_calls": [CALL]},
                {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
                RESULT,
            ],
            "tools": [{"type": "function", "function": FUNCTION, "strict": True}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_tokens": 8,
            "max_completion_tokens": None,
            "n": 1,
            "stop": ["!"],
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 0,
            "response_format": {"type": "text"},
            "reasoning_effort": "low",
            "stream_options": {"include_usage": True},
            "logit_bias": {},
            "metadata": {},
            **LIMITS,
        },
        {
            "model": "policy",
            "messages": [HI],
            "tools": [CALC],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "calc"}}],
                },
            },
            "stop": "!",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
        {
            "model": "policy",
            "messages": [HI],
            "tools": [CALC],
            "tool_choice": {"type": "function", "function": {"name": "calc"}},
        },
    ],
    COMPLETIONS: [
        {
            "model": "policy",
            "prompt": "hi",
            "max_tokens": 8,
            "n": 1,
            "best_of": 1,
            "stop": "!",
            "seed": 1,
            "logprobs": 0,
            "echo": False,
            "suffix": "",
            "add_special_tokens": True,
            "stream_options": {"include_usage": True},
            "tools": None,
            **LIMITS,
            "chat_template_kwargs": {},
        },
        {"model": "policy", "prompt": [[1, 2], [3]], "stop": ["!"]},
        {"model": "policy", "prompt": ["a", "b"]},
    ],
    RESPONSES: [
        {
            "model": "policy",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                    "name": "u",
                },
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
                {"type": "reasoning", "content": [], "summary": [{"type": "summary_text", "text": "r"}]},
                {"type": "function_call", "name": "calc", "call_id": "c1", "arguments": "{}"},
                {"role": "assistant", "content": "b"},
                {"type": "function_call_output", "call_id": "c1", "output": "4"},
                {"type": "additional_tools"},
                {"role": "user", "content": "c"},
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", **FUNCTION, "function": None}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_output_tokens": 8,
            "include": ["message.output_text.logprobs"],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "store": True,
            "previous_response_id": None,
            "prompt": None,
            "truncation": "disabled",
            "background": False,
            "metadata": {},
            **LIMITS,
        },
        {
            "model": "policy",
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "calc"}, {"function": {"name": "calc"}}],
                "allowed_tools": None,
            },
            "text": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        },
        {
            "model": "policy",
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "calc"},
        },
        {"model": "policy", "input": [HI, {"type": "item_reference", "id": "msg_x.0.0.1"}]},
    ],
    MESSAGES: [
        {
            "model": "policy",
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "r"},
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "c1", "name": "calc", "input": {"expression": "1"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [{"type": "text", "text": "4"}],
                        },
                        {"type": "text", "text": "so"},
                    ],
                },
                {"role": "system", "content": "be"},
                HI,
            ],
            "system": [{"type": "text", "text": "be"}],
            "tools": [
                {
                    "name": "calc",
                    "description": "Evaluates.",
                    "input_schema": SCHEMA,
                    "type": "custom",
                    "strict": False,
                    "defer_loading": False,
                    "function": None,
                }
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "max_tokens": 8,
            "stop_sequences": ["!"],
            "thinking": {"type": "enabled"},
            "output_config": {"effort": "low"},
            "output_format": None,
            "thread": None,
            "metadata": {},
            **LIMITS,
        },
        {
            "model": "policy",
            "messages": [HI],
            "system": "be",
            "max_tokens": 8,
            "tools": [{"name": "calc"}],
            "tool_choice": {"type": "tool", "name": "calc"},
            "output_config": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        },
    ],
    GOOGLE: [
        {
            "model": "policy",
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {
                    "role": "model",
                    "parts": [
                        {"text": "r", "thought": True},
                        {"function_call": {"name": "calc", "args": {"expression": "1"}, "id": "c1"}},
                    ],
                },
                {
                    "role": "user",
                    "parts": [
                        {
                            "function_response": {
                                "name": "calc",
                                "id": "c1",
                                "response": {"output": "4"},
                                "parts": [],
                            }
                        }
                    ],
                },
            ],
            "system_instruction": {"parts": [{"text": "Be brief."}]},
            "tools": [
                {
                    "function_declarations": [
                        {
                            "name": "calc",
                            "description": "d",
                            "parameters": {"type": "OBJECT"},
                            "parameters_json_schema": None,
                            "strict": None,
                            "defer_loading": None,
                        }
                    ],
                    "function": None,
                    "strict": None,
                }
            ],
            "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["calc"]}},
            "max_output_tokens": 8,
            "candidate_count": 1,
            "seed": 1,
            "response_logprobs": True,
            "logprobs": 0,
            "stop_sequences": ["!"],
            "response_mime_type": "text/plain",
            "response_schema": None,
            "response_json_schema": None,
            "cached_content": None,
            "safety_settings": [],
            **LIMITS,
        },
        {
            "contents": [{"parts": [{"text": "hi"}]}],
            "generation_config": {"responseMimeType": "application/json", "responseSchema": {}},
            "response_schema": SCHEMA,
            "response_mime_type": "application/json",
        },
        {"generate_content_request": {"contents": [{"parts": [{"text": "hi"}]}]}},
    ],
}


class Worst(NamedTuple):
    path: str
    variant: int
    place: Place
    filler: str
    """Name of the filler, or `many`: the list at the place is repeated."""

    def __str__(self) -> str:
        return f"{self.path} {self.variant} {'.'.join(map(str, self.place))} {self.filler}"

    def body(self, **more: Any) -> bytes:
        """`more`: fields that the body has besides."""
        # a copy in which nothing is shared
        body = json.loads(json.dumps(WHOLE[self.path][self.variant])) | more
        *outer, last = self.place
        holder: Any = functools.reduce(lambda value, step: value[step], outer, body)
        value = holder[last]
        holder[last] = "@filler@"
        return json.dumps(body).encode().replace(b'"@filler@"', self._filler(value))

    def _filler(self, value: Any) -> bytes:
        if self.filler != "many":
            return bytes(filler(self.filler))
        inner = json.dumps(value)[1:-1]
        num = min(NUM_BYTES // (len(inner) + 1), NUM_VALUES // max(1, sum(map(inner.count, "[{,")) + 1))
        return f"[{','.join([inner] * num)}]".encode()


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where a body has values."""
    steps: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for step, inner in steps:
        yield (*at, step)
        yield from places(inner, (*at, step))


def worst(path: str, variant: int, place: Place) -> list[Worst]:
    """The worst bodies for one place."""
    value = functools.reduce(lambda one, step: one[step], place, WHOLE[path][variant])
    many = ["many"] if isinstance(value, list) and value else []
    names = (
        FILLERS if len(place) == 1 else ("text", "fitting", "names") if isinstance(value, str) else ("lists",)
    )
    return [Worst(path, variant, place, name) for name in [*names, *many]]


def _distinct_places() -> Iterator[tuple[str, int, Place]]:
    known = set[tuple[str, str, type]]()
    for path, bodies in WHOLE.items():
        for variant, body in enumerate(bodies):
            for place in places(body):
                value = functools.reduce(lambda one, step: one[step], place, body)
                if (named := (path, name_of(place), type(value))) not in known:
                    known.add(named)
                    yield path, variant, place


def name_of(place: Place) -> str:
    """A place as the name of a field, whatever the index of a list."""
    return ".".join("[]" if isinstance(step, int) else step for step in place)


PLACES = [*_distinct_places()]


class Spy(dict[str, Any]):
    """An object of a body that notes which of its fields are read, and in the objects inside it."""

    def __init__(self, given: Body, at: Place, seen: set[str]) -> None:
        super().__init__({name: spy(value, (*at, name), seen) for name, value in given.items()})
        self._at = at
        self._seen = seen

    def _note(self, name: str) -> None:
        self._seen.add(name_of((*self._at, name)))

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)


def spy(value: Any, at: Place, seen: set[str]) -> Any:
    if isinstance(value, dict):
        return Spy(value, at, seen)
    if isinstance(value, list):
        return [spy(inner, (*at, i), seen) for i, inner in enumerate(value)]
    return value
