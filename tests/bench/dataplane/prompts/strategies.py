"""Hypothesis strategies of conversations."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.bench.dataplane.prompts.shapes import Call, Said, Shape

_TEXTS = st.sampled_from(
    ["hi", "Find 12.", " spaced ", "two\nlines\n", "naïve 数学 🙂", "a <|im_end|> b</s>"]
)
_ANSWERS = st.one_of(_TEXTS, st.sampled_from(["", "<think>\nwhy\n</think>\n\nso"]))
_ONE = st.tuples(_TEXTS)
_SEVERAL = st.lists(_TEXTS, min_size=2, max_size=3).map(tuple)
# what the table is about is rare, so that most examples are of what must be equal
_PARTS = st.integers(0, 7).flatmap(lambda at: _SEVERAL if at == 0 else _ONE)
_SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "description": "What."}, "path": {"type": "string"}},
    "required": ["x"],
}
_ARGUMENTS: Any = st.sampled_from(
    [{}, {"x": 1}, {"x": 2**70}, {"path": "a/ä.txt", "x": [1, {"y": None}]}, {"x": 1.5}]
)


@st.composite
def _tool(draw: st.DrawFn, name: str) -> dict[str, Any]:
    tool: dict[str, Any] = {"name": name}
    if draw(st.integers(0, 4)):
        tool["description"] = draw(st.sampled_from(["Finds.", "Finds\nmuch <b>."]))
    tool["parameters"] = draw(st.sampled_from([_SCHEMA, {"type": "object", "properties": {}}]))
    if draw(st.integers(0, 4)) == 0:
        del tool["parameters"]
    if draw(st.integers(0, 3)) == 0:
        tool["strict"] = draw(st.booleans())
    return tool


@st.composite
def _round(draw: st.DrawFn, number: int, has_tools: bool) -> list[Said]:
    """What a user says, and the answers to it but the last."""
    said = [Said("user", draw(_PARTS))] * draw(st.sampled_from([1, 1, 1, 1, 1, 1, 2]))
    if draw(st.integers(0, 5)) == 0:
        said.insert(
            draw(st.integers(0, 1)), Said(draw(st.sampled_from(["system", "developer"])), draw(_PARTS))
        )
    for step in range(draw(st.integers(0, 2 if has_tools else 0))):
        calls = [
            Call(
                f"c{number}{step}{at}abcde",
                draw(st.sampled_from(["find", "open"])),
                json.dumps(draw(_ARGUMENTS)),
            )
            for at in range(draw(st.integers(1, 3)))
        ]
        if draw(st.integers(0, 15)) == 0:
            calls[0] = Call(
                calls[0].call_id, calls[0].name, draw(st.sampled_from(["{'x': 1}", "[1]", "", '{"x": 1']))
            )
        text = draw(st.one_of(st.just(()), st.tuples(_ANSWERS)))
        said.append(Said("assistant", text, draw(st.sampled_from(["", "because"])), tuple(calls)))
        order = draw(st.permutations(calls)) if draw(st.integers(0, 3)) == 0 else calls
        said += [Said("tool", draw(_PARTS), answers=c.call_id) for c in order]
    return said


@st.composite
def shapes(draw: st.DrawFn, max_rounds: int = 3) -> Shape:
    names = draw(st.sampled_from([[], ["find"], ["find", "open"]]))
    said: list[Said] = []
    if draw(st.booleans()):
        said.append(Said(draw(st.sampled_from(["system", "system", "system", "developer"])), draw(_PARTS)))
    rounds = draw(st.integers(1, max_rounds))
    for number in range(rounds):
        said += draw(_round(number, bool(names)))
        if number < rounds - 1:
            parts = draw(st.one_of(st.tuples(_ANSWERS), _PARTS))
            said.append(Said("assistant", parts, draw(st.sampled_from(["", "", "because\nof it"]))))
    options = draw(
        st.sampled_from([{}, {}, {}, {"enable_thinking": False}, {"enable_thinking": True}, {"unknown": 1}])
    )
    effort = draw(st.sampled_from(["", "", "", "", "", "none", "low"]))
    reasoning_name = draw(st.sampled_from(["reasoning_content", "reasoning"]))
    return Shape(tuple(said), tuple(draw(_tool(name)) for name in names), options, effort, reasoning_name)
