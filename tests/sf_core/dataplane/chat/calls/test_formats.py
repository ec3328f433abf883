from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.chat.calls.base import CALL_END, CALL_START
from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.calls.llama3_json import PYTHON_TAG
from sf_core.dataplane.chat.messages import assistant_message
from sf_core.dataplane.chat.tool_formats import ToolCall
from tests.bench.dataplane.planes import CALC
from tests.bench.dataplane.tools import ADD

STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [CALC, ADD, STOP]
CALLS = [ToolCall("calc", {"expression": "47 * 83"}), ToolCall("add", {"n": 12}), ToolCall("stop", {})]


def split(tool_format: str, *texts: str) -> tuple[list[str | ToolCall], int]:
    """Calls, the text between them, and the number of calls that stayed text."""
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


# read by one JSON library, and not written by the one that writes records and answers
UNWRITABLE = [
    '{"x": "\\ud800"}',
    '{"x": NaN}',
    '{"x": -Infinity}',
    '{"x": ' + "9" * 5000 + "}",
    '{"x": ' + "[" * 250 + "]" * 250 + "}",
    '{"x": ' + "[" * 5000 + "]" * 5000 + "}",
]


@pytest.mark.parametrize("arguments", UNWRITABLE, ids=lambda text: text[:20])
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_call_that_no_answer_could_hold_stays_text(name: str, arguments: str) -> None:
    key = "arguments" if name == "hermes" else "parameters"
    text = f'{{"name": "calc", "{key}": {arguments}}}'
    whole = f"{CALL_START}{text}{CALL_END}" if name == "hermes" else text
    assert split(name, whole) == ([whole], 1)


def test_an_integer_of_more_than_64_bits_stays_what_was_written() -> None:
    for name in ("hermes", "llama3_json"):
        text = FORMATS[name].render(ToolCall("add", {"n": 2**70}))
        assert split(name, text) == ([ToolCall("add", {"n": 2**70})], 0)


def test_a_call_that_never_ends_stays_text() -> None:
    for tool_format, text in [("plain", f"so {CALL_START}calc 1"), ("llama3_json", '{"name": "calc", ')]:
        assert split(tool_format, text) == ([text], 1)


def test_a_plain_argument_is_a_number_where_the_schema_wants_one_and_it_is_one() -> None:
    for argument, value in [("12", 12), ("twelve", "twelve"), ("9" * 40, int("9" * 40))]:
        assert split("plain", f"{CALL_START}add {argument}{CALL_END}")[0] == [ToolCall("add", {"n": value})]


def test_llama_calls_are_the_whole_answer_or_several_with_semicolons() -> None:
    one, two = (FORMATS["llama3_json"].render(call) for call in CALLS[:2])
    assert split("llama3_json", f"{PYTHON_TAG}{one}") == (CALLS[:1], 0)
    assert split("llama3_json", f"\n{one}; {two}\n") == (CALLS[:2], 0)
    assert split("llama3_json", f"I say {one}") == ([f"I say {one}"], 1)
    assert split("llama3_json", '{"name": "rm", "parameters": {}} ok')[1] == 1


VALUES = ["1", "NaN", "9" * 25, '"\\ud800"', "[" * 250 + "]" * 250]
PIECES: dict[str, list[str]] = {
    "plain": [CALL_START, CALL_END, "add 1", " ", "\n", "<", "tool_call>", "</tool", "é", "calc 2*3"],
    "hermes": [CALL_START, CALL_END, '{"name": "add", ', "{", "<tool"]
    + [f'"arguments": {{"n": {value}}}}}' for value in VALUES],
    "qwen3_coder": [
        CALL_START,
        CALL_END,
        "<function=add>",
        "</function>",
        "\n",
        " ",
        "</func",
        "so",
        "<",
        "tool_call>",
    ]
    + [f"<parameter=n>\n{value}\n" for value in VALUES]
    + ["</parameter>"],
    "glm45": [
        CALL_START,
        CALL_END,
        "add\n",
        "<arg_key>n</arg_key>",
        "<arg_key>",
        "\n",
        "so",
        "<",
        "tool_call>",
    ]
    + [f"<arg_value>{value}</arg_value>" for value in VALUES],
    "mistral_list": ["[TOOL_CALLS]", "[", "]", ", ", "[TOOL", "_CALLS]", "}", "so", '{"name": "add", ']
    + [f'"arguments": {{"n": {value}}}}}' for value in VALUES],
    "mistral": ["[TOOL_CALLS]", "add", "[ARGS]", "[CALL_ID]x1", "[TOOL", "_CALLS]", "}", "so", "{}"]
    + [f'{{"n": {value}}}' for value in VALUES],
    "llama3_json": ['{"name": "add", ', "; ", "<|py", "thon_tag|>", "}", "so", " ", "\n"]
    + [f'"parameters": {{"n": {value}}}}}' for value in VALUES],
}


@pytest.mark.parametrize("name", PIECES)
@given(data=st.data())
def test_however_the_text_arrives_the_split_is_the_same_and_can_be_answered(
    name: str, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts, num_unparsed = split(name, *pieces)
    assert (parts, num_unparsed) == split(name, text)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    message = assistant_message("", calls, "s.0.0")
    assert msgspec.json.decode(msgspec.json.encode(message)) == message
