from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.chat.answer_parser import AnswerStream, Reasoning, ReasoningSplitter, StopStrings
from sf_core.dataplane.chat.calls.base import CALL_END, CALL_START
from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.tool_formats import ToolCall
from tests.bench.dataplane.planes import CALC
from tests.bench.dataplane.tools import ADD

TOOLS = [CALC, ADD]


def answer(*texts: str, tools: list[Any] = TOOLS, is_open: bool | None = None) -> AnswerStream:
    """Parse an answer given in pieces; `is_open` is None for a model that does not reason."""
    splitter = FORMATS["plain"].splitter(tools) if tools else None
    others = [CALL_START] if tools else []
    stream = AnswerStream(splitter, None if is_open is None else ReasoningSplitter(is_open, others))
    events = [event for text in texts for event in stream.push(text)] + stream.finish()
    assert "".join(event for event in events if isinstance(event, str)) == stream.content
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == stream.reasoning
    assert [event for event in events if isinstance(event, ToolCall)] == stream.calls
    return stream


def test_white_space_around_calls_is_no_content() -> None:
    call = f"{CALL_START}add 1{CALL_END}"
    assert answer(f"\n{call}\n{call}\n").content == ""
    assert answer(f"First.\n{call}").content == "First.\n"
    assert answer(f"First.{call}\n{call}\n").content == "First."
    assert answer(f"First.{call}\nThen.").content == "First.\nThen."
    assert answer(" \n").content == " \n"


def test_without_tools_everything_is_content() -> None:
    text = f" {CALL_START}add 1{CALL_END}"
    assert answer(text, tools=[]).content == text


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm, so\n</think>\n\nYes.", False, "hm, so", "Yes."),
        ("hm, so\n</think>\n\nYes.", True, "hm, so", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>never closed", False, "never closed", ""),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("<thing>", False, "", "<thing>"),
        ("<think>x\n" + CALL_START + "add 1" + CALL_END, False, "x", ""),
        ("x" + CALL_START + "add 1" + CALL_END + "Yes.", True, "x", "Yes."),
        ("<think>x</think>\n" + CALL_START + "add 1" + CALL_END, False, "x", ""),
    ],
)
def test_reasoning_at_the_start_is_split_off(text: str, is_open: bool, reasoning: str, content: str) -> None:
    stream = answer(text, is_open=is_open)
    assert (stream.reasoning, stream.content) == (reasoning, content)
    assert len(stream.calls) == text.count(CALL_START)


PIECES = [CALL_START, CALL_END, "add 1", "add", " ", "\n", "<", "<think>", "</think>", "</th", "é", "calc 2"]


@given(st.lists(st.sampled_from(PIECES)), st.sampled_from([None, False, True]), st.data())
def test_however_the_text_arrives_the_answer_is_the_same(
    parts: list[str], is_open: bool | None, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = answer(*pieces, is_open=is_open)
    whole = answer(text, is_open=is_open)
    assert (stream.content, stream.calls) == (whole.content, whole.calls)
    assert stream.reasoning.rstrip() == whole.reasoning.rstrip()


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
