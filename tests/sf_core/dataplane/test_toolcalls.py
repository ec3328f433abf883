from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.toolcalls import CALL_END, CALL_START, FORMATS, AnswerStream, StopStrings, ToolCall
from tests.sf_core.dataplane.stand import CALC

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
TOOLS = [CALC, ADD]


def split(text: str, tool_format: str = "hermes", tools: list[Any] = TOOLS) -> AnswerStream:
    stream = AnswerStream(tools, tool_format)
    stream.push(text)
    stream.finish()
    return stream


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("call", [ToolCall("calc", {"expression": "47 * 83"}), ToolCall("add", {"n": 12})])
def test_a_rendered_call_parses_to_itself(name: str, call: ToolCall) -> None:
    assert FORMATS[name].parse(FORMATS[name].render(call), TOOLS) == call


@pytest.mark.parametrize(
    ("tool_format", "inside"),
    [
        ("hermes", "not json"),
        ("hermes", '{"name": "unknown", "arguments": {}}'),
        ("hermes", '{"name": "calc", "arguments": "47*83"}'),
        ("hermes", '["calc"]'),
        ("plain", "unknown 47*83"),
        ("plain", ""),
    ],
)
def test_what_is_no_call_stays_text_and_is_counted(tool_format: str, inside: str) -> None:
    text = f"so {CALL_START}{inside}{CALL_END}!"
    stream = split(text, tool_format)
    assert (stream.content, stream.calls, stream.num_unparsed) == (text, [], 1)


def test_a_call_that_never_ends_stays_text() -> None:
    stream = split(f"so {CALL_START}calc 1", "plain")
    assert (stream.content, stream.calls, stream.num_unparsed) == (f"so {CALL_START}calc 1", [], 1)


def test_a_plain_argument_is_a_number_where_the_schema_wants_one_and_it_is_one() -> None:
    parse = FORMATS["plain"].parse
    assert parse("add 12", TOOLS) == ToolCall("add", {"n": 12})
    assert parse("add twelve", TOOLS) == ToolCall("add", {"n": "twelve"})
    assert parse("add " + "9" * 40, TOOLS) == ToolCall("add", {"n": "9" * 40})


def test_white_space_around_calls_is_no_content() -> None:
    call = f"{CALL_START}add 1{CALL_END}"
    assert split(f"\n{call}\n{call}\n", "plain").content == ""
    assert split(f"First.\n{call}", "plain").content == "First.\n"
    assert split(" \n", "plain").content == " \n"


def test_without_tools_everything_is_content() -> None:
    text = f" {CALL_START}add 1{CALL_END}"
    assert split(text, tools=[]).content == text


PIECES = [CALL_START, CALL_END, "add 1", "add", " ", "\n", "<", "tool_call>", "</tool", "é", "calc 2*3"]


@given(st.lists(st.sampled_from(PIECES)), st.data())
def test_however_the_text_arrives_the_answer_is_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    stream = AnswerStream(TOOLS, "plain")
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += stream.push(text[start:end])
    events += stream.finish()
    whole = split(text, "plain")
    assert (stream.content, stream.calls) == (whole.content, whole.calls)
    assert "".join(event for event in events if isinstance(event, str)) == stream.content
    assert [event for event in events if isinstance(event, ToolCall)] == stream.calls


letters = st.text("ab<|", min_size=1, max_size=4)


@given(st.text("ab<|", max_size=30), st.lists(letters, min_size=1, max_size=3))
def test_text_is_cut_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops)
    out = ""
    for length, letter in enumerate(text, 1):
        out += finder.push(letter)
        if finder.found:
            assert any(text[:length].endswith(stop) for stop in stops)
            break
    else:
        out += finder.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert out == text
    else:
        assert finder.found
        assert length == min(ends)
        assert out == text[: min(text.find(stop) for stop in stops if stop in text[:length])]
