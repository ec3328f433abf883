from __future__ import annotations

import orjson
import pytest

from sf_core.dataplane.chat.json_text import read_json
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import parse_json

# orjson reads it and does not write it
DEEP = '{"x": ' + "[" * 300 + "]" * 300 + "}"


def test_what_is_read_can_be_written_inside_of_records() -> None:
    for text in ('{"x": [1]}', '{"x": "' + "[" * 300 + '"}', f"[{', '.join(['{}'] * 300)}]"):
        assert orjson.loads(orjson.dumps(read_json(text))) == read_json(text.encode()) == orjson.loads(text)
    for deep in (DEEP, DEEP.encode()):
        with pytest.raises(orjson.JSONEncodeError):
            read_json(deep)


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ApiError, match="The request body is nested too deeply"):
        parse_json(DEEP.encode())
