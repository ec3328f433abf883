from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sf_core.dataplane.chat.json_text import MAX_DEPTH, TooDeepError, read_json, repair_json
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import parse_json


def nested(num_levels: int) -> str:
    return "[" * num_levels + "]" * num_levels


def test_what_is_read_can_be_written_inside_of_records() -> None:
    for text in (nested(MAX_DEPTH), '{"x": "' + "[" * 300 + '"}', f"[{', '.join(['{}'] * 300)}]", "9" * 4000):
        value = read_json(text)
        assert msgspec.json.decode(msgspec.json.encode(value)) == value == read_json(text.encode())
    for levels in (MAX_DEPTH + 1, 1000, 100_000):
        for read in (read_json, repair_json):
            with pytest.raises(TooDeepError):
                read(nested(levels))
        with pytest.raises(TooDeepError):
            repair_json(f'["\\ud83d", {nested(levels - 1)}]'.encode())


@pytest.mark.parametrize(
    "text, value",
    [
        ('"\\ud83d"', "\ufffd"),
        ('"a\\ude00\\ud83d b"', "a\ufffd\ufffd b"),
        ('"\\ud83d\\ude00\\ud83d"', "\U0001f600\ufffd"),
        ('{"\\udfff": ["\\ud800", 1, "x"]}', {"\ufffd": ["\ufffd", 1, "x"]}),
        ('["\\ud83d", ' + "9" * 99 + "]", ["\ufffd", int("9" * 99)]),
        (b'"\xed\xa0\xbd"', "\ufffd"),
    ],
)
def test_half_a_character_is_mended(text: str | bytes, value: Any) -> None:
    with pytest.raises(ValueError):
        read_json(text)
    assert repair_json(text) == (value, True)


def test_whole_characters_are_not_touched() -> None:
    text = json.dumps(["\U0001f600", "\ufffd", "naïve"])
    assert repair_json(text) == (read_json(text), False)


@pytest.mark.parametrize(
    "text",
    [
        b'"\xff"',
        b"[",
        b"",
        b"NaN",
        b"[-Infinity]",
        b"1e999",
        b"9" * 5000,
        b'["\\ud83d", 1e999]',
        '"x"'.encode("utf-16"),
    ],
)
def test_what_is_no_json_is_refused_in_one_sentence(text: bytes) -> None:
    with pytest.raises(ApiError, match=r"The request body is not valid JSON: .") as refused:
        parse_json(text)
    assert "\n" not in refused.value.message


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ApiError, match="The request body is nested too deeply: at most 250 levels"):
        parse_json(nested(251).encode())
