"""JSON of requests, records and answers: what is read can be written again, integers of any size exactly."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any

import msgspec

MAX_DEPTH = 250
"""Levels of nesting that are read. Templates, records and the interpreter's stack have room for as many."""


MAX_VALUES = 2**17
"""Values of a text that are read: lists, objects, and their contents. A request of 16,000 messages has fewer.
More of them cost the interpreter seconds, and memory 20 times the size of the text."""

CUT = 65_536
"""Characters of a text that are looked at in one piece: no other thread runs meanwhile."""


class TooDeepError(ValueError):
    """A value is nested in more levels than `MAX_DEPTH`."""


def count_values(text: bytes, numbers: bool = True) -> int:
    """Number of values in a JSON text, give or take empty lists and objects. Reads no value. Without
    `numbers` it counts only strings, lists and objects."""
    # what is quoted is no mark; each value has two quoted strings at most, itself and its name
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes = bare.count(b'"')
    if quotes > 4 * MAX_VALUES:
        return quotes // 4
    marks = count_marks(b"".join(bare.split(b'"')[::2]), numbers)
    return marks + (1 if numbers else quotes // 2)


def count_marks(text: bytes, numbers: bool = True) -> int:
    """Number of characters beside which values may begin: at little cost a bound of the number of values,
    which is far above it where strings hold such characters."""
    return text.count(b"[") + text.count(b"{") + (text.count(b",") if numbers else text.count(b'"') // 2)


def has_too_many(text: bytes, numbers: bool = True) -> bool:
    """Whether a JSON text holds more than `MAX_VALUES`, of which numbers may not count."""
    if len(text) <= MAX_VALUES:
        return False
    return count_marks(text, numbers) > MAX_VALUES and count_values(text, numbers) > MAX_VALUES


def read_json(text: bytes | str) -> Any:
    """A value. Raises ValueError with what is wrong, of which TooDeepError is one kind."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise TooDeepError from None
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    return _check_depth(value, text)


def mend_json(text: bytes | str) -> tuple[Any, bool]:
    """Read JSON in which strings may hold half a character, as JavaScript writes one that was cut: it becomes
    U+FFFD. Tells whether one did. Raises ValueError as read_json does."""
    try:
        return read_json(text), False
    except TooDeepError:
        raise
    except ValueError as error:
        try:
            read = json.loads(text, parse_constant=_refuse, parse_float=_read_float)
        except RecursionError:
            raise TooDeepError from None
        except ValueError:
            raise error from None
    value = _without_halves(_check_depth(read, text))
    if value == read:
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
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for values in inner for one in values if isinstance(one, dict | list)]
        if not level:
            return False
    return True


_HALF = re.compile("[\ud800-\udfff]")


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        cut = (value[start : start + CUT] for start in range(0, len(value), CUT))
        return "".join(_HALF.sub("\N{REPLACEMENT CHARACTER}", part) for part in cut)
    if isinstance(value, list):
        return [_without_halves(one) for one in value]
    if isinstance(value, dict):
        return {_without_halves(name): _without_halves(one) for name, one in value.items()}
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _read_float(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError("number out of range")
    return value


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
