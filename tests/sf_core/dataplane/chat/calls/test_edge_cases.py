from __future__ import annotations

import pytest

from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.tool_formats import Parts, ToolCall
from tests.sf_core.dataplane.chat.calls import edge_cases


def read(form: str, *pieces: str) -> tuple[Parts, int]:
    """Calls, the text between them, and the number of calls that stayed text."""
    splitter = FORMATS[form].splitter(edge_cases.TOOLS)
    parts: Parts = []
    for part in [*(part for piece in pieces for part in splitter.push(piece)), *splitter.finish()]:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part:
            parts.append(part)
    return parts, splitter.num_unparsed


def calls_of(parts: Parts) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize("case", edge_cases.CASES, ids=lambda case: f"{case.form}: {case.title}")
def test_calls_are_read_as_they_are_written(case: edge_cases.Case) -> None:
    parts, num_unparsed = read(case.form, case.text)
    # numbers that are equal may be of two types
    assert (repr(calls_of(parts)), num_unparsed) == (repr(case.ours), case.unparsed)


@pytest.mark.parametrize("case", edge_cases.CASES, ids=lambda case: f"{case.form}: {case.title}")
def test_however_the_answer_arrives_the_calls_are_the_same(case: edge_cases.Case) -> None:
    whole = read(case.form, case.text)
    assert read(case.form, *case.text) == whole
    for at in range(len(case.text)):
        assert read(case.form, case.text[:at], case.text[at:]) == whole


@pytest.mark.parametrize("form", edge_cases.FORMS)
def test_a_call_that_is_cut_is_the_call_that_was_written_or_is_counted(form: str) -> None:
    written_call = edge_cases.call(text='say "hi"', num=12, some=["a", "b"], more={"k": 1.5})
    text = edge_cases.written(form, written_call)
    mark = 1 if form == "llama3_json" else len(FORMATS[form].marks[0])
    for length in range(len(text)):
        parts, num_unparsed = read(form, text[:length])
        if parts and isinstance(parts[0], ToolCall):
            assert (calls_of(parts), num_unparsed) == ([written_call], 0)
        else:
            assert parts == ([text[:length]] if length else [])
            assert num_unparsed == (length >= mark)


def test_every_difference_is_of_a_case() -> None:
    assert edge_cases.DIFFERENT.keys() <= {(case.form, case.title) for case in edge_cases.CASES}
