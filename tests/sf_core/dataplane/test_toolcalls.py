from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.toolcalls import (
    CALL_END,
    CALL_START,
    FORMATS,
    PYTHON_TAG,
    ToolCall,
    format_of,
)
from tests.sf_core.dataplane.stand import CALC

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [CALC, ADD, STOP]
CALLS = [ToolCall("calc", {"expression": "47 * 83"}), ToolCall("add", {"n": 12}), ToolCall("stop", {})]


def split(tool_format: str, *texts: str) -> tuple[list[str | ToolCall], int]:
    """Calls and the text between them, and how many calls stayed text."""
    splitter = FORMATS[tool_format].splitter(TOOLS)
    pieces = [part for text in texts for part in splitter.push(text)] + splitter.finish()
    parts: list[str | ToolCall] = []
    for part in pieces:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part:
            parts.append(part)
    return parts, splitter.num_unparsed


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("call", CALLS)
def test_a_rendered_call_parses_to_itself(name: str, call: ToolCall) -> None:
    assert split(name, FORMATS[name].render(call)) == ([call], 0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("call", CALLS)
def test_a_rendered_call_begins_as_a_forced_one_does(name: str, call: ToolCall) -> None:
    tool = next(tool for tool in TOOLS if tool["function"]["name"] == call.name)
    for opening in (FORMATS[name].opening(None), FORMATS[name].opening(tool)):
        assert FORMATS[name].render(call).startswith(opening)


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
    assert split(tool_format, text) == ([text], 1)


def test_a_call_that_never_ends_stays_text() -> None:
    for tool_format, text in [("plain", f"so {CALL_START}calc 1"), ("llama3_json", '{"name": "calc", ')]:
        assert split(tool_format, text) == ([text], 1)


def test_a_plain_argument_is_a_number_where_the_schema_wants_one_and_it_is_one() -> None:
    for argument, value in [("12", 12), ("twelve", "twelve"), ("9" * 40, "9" * 40)]:
        assert split("plain", f"{CALL_START}add {argument}{CALL_END}")[0] == [ToolCall("add", {"n": value})]


def test_llama_calls_are_the_whole_answer_or_several_with_semicolons() -> None:
    one, two = (FORMATS["llama3_json"].render(call) for call in CALLS[:2])
    assert split("llama3_json", f"{PYTHON_TAG}{one}") == (CALLS[:1], 0)
    assert split("llama3_json", f"\n{one}; {two}\n") == (CALLS[:2], 0)
    assert split("llama3_json", f"I say {one}") == ([f"I say {one}"], 0)
    assert split("llama3_json", '{"name": "rm", "parameters": {}} ok')[1] == 1


def test_the_family_is_read_from_the_template() -> None:
    assert format_of("<tool_call> {{ x }} </tool_call>") == "hermes"
    assert format_of('{"name": x, "parameters": y}') == "llama3_json"
    assert format_of("{{ messages }}") == "hermes"


PIECES: dict[str, list[str]] = {
    "plain": [CALL_START, CALL_END, "add 1", " ", "\n", "<", "tool_call>", "</tool", "é", "calc 2*3"],
    "hermes": [CALL_START, CALL_END, '{"name": "add", ', '"arguments": {"n": 1}}', "{", "<tool"],
    "llama3_json": ['{"name": "add", ', '"parameters": {"n": 1}}', "; ", "<|py", "thon_tag|>", "}", "so"],
}


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_however_the_text_arrives_the_split_is_the_same(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(name, *pieces) == split(name, text)
