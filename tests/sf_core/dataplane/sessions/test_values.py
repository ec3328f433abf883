"""Every JSON value comes through a session as it is: sampled, answered, sent back, matched and stored."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.gateway.dialects.checks import parse_object
from sf_core.dataplane.gateway.dialects.protocol import Dialect
from sf_core.dataplane.turns.answer import Answer
from tests.bench.dataplane import conversations
from tests.sf_core.dataplane.sessions import said_calls

plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
large = st.integers(19, 4000).map(lambda n: 10**n - 1) | st.integers(-(2**70), 2**70)
values = st.recursive(
    plain | large, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=9
)


def _arguments(value: Any) -> list[Any]:
    """The arguments of all calls in a response of any dialect."""
    if isinstance(value, list):
        return [made for one in value for made in _arguments(one)]
    if not isinstance(value, dict):
        return []
    found = [value[key] for key in ("arguments", "args", "input") if key in value]
    return found or [made for one in value.values() for made in _arguments(one)]


@pytest.mark.parametrize(
    ("dialect", "body"), said_calls.DIALECTS, ids=lambda value: getattr(value, "name", "")
)
@given(value=values)
def test_a_value_comes_back_as_it_was_sampled(
    dialect: Dialect, body: Callable[[Sequence[said_calls.Said]], dict[str, Any]], value: Any
) -> None:
    renderer = conversations.family("qwen3")
    record = conversations.Record(conversations.family("qwen3"))
    path = dialect.paths[0].replace("{model:path}", "policy")

    def asked(said: Sequence[Any]) -> Any:
        sent, was_repaired = parse_object(json.dumps(body(said) | {"model": "policy"}).encode())
        assert not was_repaired
        [request] = dialect.parse(dialect.read(sent, path), record.session)
        assert request.left_out.kinds == []
        return request

    request = asked([])
    prompt = record.session.open_prompt(request.messages, request.tools, renderer)
    text = FORMATS["hermes"].render(ToolCall("find", {"x": value}))
    # the first end mark ends a call, as in vLLM's parser; hypothesis also draws texts that the code has
    assume(text.count("</tool_call>") == 1)
    [call], _ = _split(text, request.tools)
    assert json.dumps(call.arguments) == json.dumps({"x": value})
    turn = record.answer(prompt, conversations.odd_ids(renderer, text, random.Random(0)), calls=[call])

    sent = body([]) | {"model": "policy"}
    reply = dialect.reply(sent, "s.0.0", record.session)
    whole = reply.whole([Answer("s.0.0", turn.message, "tool_calls", None, 3, 4, None)])
    [answered] = _arguments(json.loads(whole))
    answered = json.loads(answered) if isinstance(answered, str) else answered
    assert json.dumps(answered) == json.dumps({"x": value})

    again = asked([(turn.message["tool_calls"][0]["id"], answered["x"], "found")])
    prompt = record.session.open_prompt(again.messages, again.tools, renderer)
    assert prompt.continues is turn and prompt.branch_reason is None
    assert json.dumps({"x": value}, ensure_ascii=False)[1:-1] in renderer.render(again.messages, again.tools)
    record.answer(prompt, conversations.odd_ids(renderer, "done", random.Random(0)))
    [row] = record.export()
    [made] = json.loads(row.messages)[1]["tool_calls"]
    assert json.dumps(made["function"]["arguments"]) == json.dumps({"x": value})


def _split(text: str, tools: list[Any]) -> tuple[list[ToolCall], int]:
    splitter = FORMATS["hermes"].splitter(tools)
    parts = [*splitter.push(text), *splitter.finish()]
    return [part for part in parts if isinstance(part, ToolCall)], splitter.num_unparsed
