"""JSON of requests, records and answers. Each value that is read can be written again, with integers of any
size."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any

import msgspec

MAX_DEPTH = 250
"""Most levels of nesting. Templates, records and the interpreter's stack have room for so many."""

MAX_VALUES = 2**17
"""Most values of a text: lists, objects, and their contents. A request of 16,000 messages has fewer. More
values would cost the interpreter seconds, and memory of 20 times the size of the text."""

PIECE_CHARACTERS = 65_536
"""Characters of a text that are processed in one step, during which no other thread runs."""


class TooDeepError(ValueError):
    """A value is nested in more levels than `MAX_DEPTH`."""


def count_values(text: bytes, numbers: bool = True) -> int:
    """Number of values in a JSON text, except for an error of the number of empty lists and objects. Parses
    nothing. Without `numbers` it counts only strings, lists and objects."""
    # marks inside strings do not count; a value has at most two strings, itself and its name
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes = bare.count(b'"')
    if quotes > 4 * MAX_VALUES:
        return quotes // 4
    marks = count_marks(b"".join(bare.split(b'"')[::2]), numbers)
    return marks + (1 if numbers else quotes // 2)


def count_marks(text: bytes, numbers: bool = True) -> int:
    """Number of characters at which values may begin: a cheap upper bound of the number of values. It is far
    too high if strings hold many such characters."""
    return text.count(b"[") + text.count(b"{") + (text.count(b",") if numbers else text.count(b'"') // 2)


def has_too_many_values(text: bytes, numbers: bool = True) -> bool:
    """Whether a JSON text holds more than `MAX_VALUES` values. Without `numbers`, numbers do not count."""
    if len(text) <= MAX_VALUES:
        return False
    return count_marks(text, numbers) > MAX_VALUES and count_values(text, numbers) > MAX_VALUES


def read_json(text: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError with the fault; TooDeepError is a subclass."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise TooDeepError from None
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    return _check_depth(value, text)


def repair_json(text: bytes | str) -> tuple[Any, bool]:
    """The value of a JSON text, and whether it was mended: a lone surrogate, which JavaScript writes for a
    character that was cut in half, becomes U+FFFD. Raises ValueError as read_json does."""
    try:
        return read_json(text), False
    except TooDeepError:
        raise
    except ValueError as error:
        try:
            parsed = json.loads(text, parse_constant=_refuse_constant, parse_float=_read_float)
        except RecursionError:
            raise TooDeepError from None
        except ValueError:
            raise error from None
    value = _replace_surrogates(_check_depth(parsed, text))
    if value == parsed:
        raise ValueError("the text is not encoded in UTF-8, or begins with a byte order mark")
    return value, True


def encode_sorted(value: Any) -> bytes:
    """JSON that is equal for equal values."""
    return msgspec.json.encode(value, order="sorted")


def _check_depth(value: Any, text: bytes | str) -> Any:
    # counting brackets clears most texts at almost no cost
    if isinstance(text, str):
        num_brackets = text.count("{") + text.count("[")
    else:
        num_brackets = text.count(b"{") + text.count(b"[")
    if num_brackets > MAX_DEPTH and _is_too_deep(value):
        raise TooDeepError
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        contents = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in contents for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


_SURROGATE = re.compile("[\ud800-\udfff]")


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        starts = range(0, len(value), PIECE_CHARACTERS)
        pieces = (value[start : start + PIECE_CHARACTERS] for start in starts)
        return "".join(_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", piece) for piece in pieces)
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_replace_surrogates(name): _replace_surrogates(inner) for name, inner in value.items()}
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _read_float(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError("number out of range")
    return value


JSON_TYPE_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
"""The types of JSON values, as messages name them."""


def json_type_name(value: Any) -> str:
    return "null" if value is None else JSON_TYPE_NAMES[type(value)]
