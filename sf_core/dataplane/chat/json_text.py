"""Reads JSON that must be written again later, in records and answers."""

from __future__ import annotations

from typing import Any

import orjson


def read_json(text: bytes | str) -> Any:
    """A value that orjson can write again. Raises orjson.JSONDecodeError, and orjson.JSONEncodeError if the
    text is nested too deeply for that."""
    value = orjson.loads(text)
    # orjson reads deeper nesting than it writes; counting brackets clears most texts at almost no cost
    if isinstance(text, str):
        num_brackets = text.count("{") + text.count("[")
    else:
        num_brackets = text.count(b"{") + text.count(b"[")
    if num_brackets > _SURELY_WRITABLE:
        orjson.dumps([[[[[[[[value]]]]]]]])
    return value


_SURELY_WRITABLE = 200
"""Levels of nesting that need no check; orjson writes 254."""

KINDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
"""The kinds of values that JSON has, in the words of messages."""


def kind_of(value: Any) -> str:
    return "null" if value is None else KINDS[type(value)]
