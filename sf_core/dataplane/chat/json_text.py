"""Reading JSON that will have to be written again, inside of records and answers."""

from __future__ import annotations

from typing import Any

import orjson


def read_json(text: bytes | str) -> Any:
    """What orjson can also write. Raises orjson.JSONDecodeError, and orjson.JSONEncodeError if it is nested
    too deeply."""
    value = orjson.loads(text)
    # it reads deeper than it writes; the count tells at almost no cost that most texts are not deep
    if isinstance(text, str):
        num_brackets = text.count("{") + text.count("[")
    else:
        num_brackets = text.count(b"{") + text.count(b"[")
    if num_brackets > _SURELY_WRITABLE:
        orjson.dumps([[[[[[[[value]]]]]]]])
    return value


_SURELY_WRITABLE = 200
"""Levels of nesting; orjson writes 254."""
