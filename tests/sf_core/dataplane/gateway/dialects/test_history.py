"""What clients send back becomes the messages that vLLM would hand to the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from sf_core.dataplane.chat.messages import Content, Message, text_of
from sf_core.dataplane.gateway.dialects.protocol import Dialect
from sf_core.dataplane.gateway.dialects.registry import DIALECTS
from sf_core.dataplane.gateway.normalisation import normalise
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.request import TurnRequest

CHAT, _, RESPONSES, MESSAGES, GOOGLE = DIALECTS
HI: Message = {"role": "user", "content": "hi"}
TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
FIELDS = {"chat": "messages", "messages": "messages", "responses": "input", "generate_content": "contents"}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _parse(dialect: Dialect, history: list[Any], **fields: Any) -> TurnRequest:
    body = {"model": "policy", "max_tokens": 9, FIELDS[dialect.name]: history, **fields}
    path = "/v1/models/policy:generateContent" if dialect is GOOGLE else dialect.paths[0]
    [request] = dialect.parse(dialect.read(body, path), Session("s"))
    return request


def _said(dialect: Dialect, history: list[Any], **fields: Any) -> list[Message]:
    return _parse(dialect, history, **fields).messages


def _answer(content: str | list[str], **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def _call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def _spoken(text: str) -> dict[str, Any]:
    return _item("message", role="assistant", content=[{"type": "output_text", "text": text}])


LOOKED = _item("function_call", call_id="c", name="look", arguments="{}")
THOUGHT = _item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "hm"}])


@pytest.mark.parametrize(
    "content, canonical",
    [
        ("one", "one"),
        (None, ""),
        ([], ""),
        (TWO[:1], "one"),
        (TWO, parts("one", "two")),
        ([*TWO, {"type": "text", "text": ""}, "bare"], parts("one", "two", "", "bare")),
        ([{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}], parts("no", "hm")),
    ],
)
def test_texts_of_a_chat_message_stay_apart(content: Any, canonical: Content) -> None:
    for role in ("system", "developer", "user", "assistant"):
        assert _said(CHAT, [{"role": role, "content": content}]) == [{"role": role, "content": canonical}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "look"}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": content}
    told = text_of({"content": canonical})
    assert _said(CHAT, [HI, called, result])[-1]["content"] == told


def test_blocks_of_messages_are_read_as_vllm_reads_them() -> None:
    empty = {"type": "text", "text": ""}
    system = [{"type": "text", "text": "a"}, empty, {"type": "text", "text": "b"}]
    inline = {"role": "system", "content": TWO}
    history = [{"role": "user", "content": [*TWO, empty]}, {"role": "user", "content": [empty]}, inline]
    assert _said(MESSAGES, history, system=system) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": parts("one", "two")},
        {"role": "system", "content": "onetwo"},
    ]
    history = [HI, {"role": "assistant", "content": "x"}, {"role": "user", "content": [empty]}]
    assert _said(MESSAGES, history) == [HI, _answer("x")]
    called = [{"type": "tool_use", "id": "c", "name": "look", "input": {"b": 1}}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": TWO}
    history = [HI, {"role": "assistant", "content": called}, {"role": "user", "content": [*TWO[:1], result]}]
    assert _said(MESSAGES, history) == [
        HI,
        _answer("", tool_calls=[_call("c", b=1)]),
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "c"},
        {"role": "user", "content": "one"},
    ]


@pytest.mark.parametrize(
    "items, messages",
    [
        ([THOUGHT, _spoken("x"), LOOKED], [_answer("x", reasoning_content="hm", tool_calls=[_call("c")])]),
        ([_spoken("x"), THOUGHT, LOOKED], [_answer("x", reasoning_content="hm", tool_calls=[_call("c")])]),
        ([LOOKED, _spoken("x")], [_answer("x", tool_calls=[_call("c")])]),
        ([_spoken("x"), _spoken("y")], [_answer("x"), _answer("y")]),
        (
            [THOUGHT, _spoken("x"), THOUGHT, _spoken("y")],
            [_answer("x", reasoning_content="hm"), _answer("y", reasoning_content="hm")],
        ),
        (
            [_item("reasoning", summary=[_item("summary_text", text="short")]), _spoken("x")],
            [_answer("x", reasoning_content="short")],
        ),
    ],
)
def test_items_of_responses_become_messages(items: list[Any], messages: list[Message]) -> None:
    assert _said(RESPONSES, [HI, *items]) == [HI, *messages]


def test_texts_of_a_responses_message_stay_apart_and_those_of_a_result_do_not() -> None:
    given = [{"type": "input_text", "text": text} for text in ("one", "two")]
    said = {"role": "user", "name": "ann", "content": given}
    output = _item("function_call_output", call_id="c", output=given)
    assert _said(RESPONSES, [said, LOOKED, output]) == [
        {"role": "user", "name": "ann", "content": parts("one", "two")},
        _answer("", tool_calls=[_call("c")]),
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "c"},
    ]


def test_reasoning_that_is_sent_back_is_in_the_message() -> None:
    thought = _answer("x", reasoning_content="hm")
    for field in ("reasoning", "reasoning_content"):
        assert _said(CHAT, [HI, {"role": "assistant", "content": "x", field: "hm"}, HI])[1] == thought
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "x"}]
    hidden = {"type": "redacted_thinking", "data": "?"}
    assert _said(MESSAGES, [HI, {"role": "assistant", "content": [*blocks, hidden]}, HI])[1] == thought
    asked = {"role": "user", "parts": [{"text": "hi"}]}
    parts = [{"text": "h", "thought": True}, {"text": "m", "thought": True}, {"text": "x"}]
    assert _said(GOOGLE, [asked, {"role": "model", "parts": parts}, asked])[1] == thought


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "null", '"x"', "[" * 300 + "]" * 300, 7, [1]])
def test_arguments_that_are_no_object_are_left_out_and_counted(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    history = [HI, {"role": "assistant", "content": None, "tool_calls": [call]}, HI]
    items = [HI, LOOKED | {"arguments": arguments}, HI]
    for request in (_parse(CHAT, history), _parse(RESPONSES, items)):
        assert request.messages[1]["tool_calls"] == [_call("c")]
        assert request.left_out.kinds == ["arguments"]


def test_calls_show_their_fields_in_the_order_in_which_vllm_has_them() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "look", "arguments": '{"b": 1, "a": 2}'}}
    [_, answer] = _said(CHAT, [HI, {"role": "assistant", "content": None, "tool_calls": [call]}])
    [made] = answer["tool_calls"]
    assert [*made] == ["id", "function", "type"] and [*made["function"]] == ["arguments", "name"]
    assert [*made["function"]["arguments"]] == ["b", "a"]
    [_, answer] = _said(RESPONSES, [HI, LOOKED])
    [made] = answer["tool_calls"]
    assert [*made] == ["id", "function", "type"] and [*made["function"]] == ["name", "arguments"]


def test_tools_are_as_vllm_shows_them() -> None:
    schema = {"properties": {}, "type": "object"}
    bare = {"type": "function", "function": {"name": "look", "description": None, "parameters": None}}
    full: dict[str, Any] = {"name": "look", "description": "d", "parameters": schema, "strict": True}
    mixed = {"strict": True, "parameters": schema, "x": 1, "description": "d", "name": "look"}
    cases: list[tuple[Dialect, dict[str, Any], dict[str, Any]]] = [
        (CHAT, {"type": "function", "function": {"name": "look"}, "x": 1}, bare),
        (CHAT, {"type": "function", "function": mixed}, {"type": "function", "function": full}),
        (RESPONSES, {"type": "function", "name": "look"}, bare),
        (RESPONSES, {"type": "function", **mixed}, {"type": "function", "function": full}),
    ]
    for dialect, given, tool in cases:
        [shown] = _parse(dialect, [HI], tools=[given]).tools
        assert shown == tool and [*shown["function"]] == [*tool["function"]]
    described = {"name": "look", "description": "d", "input_schema": {"properties": {}}, "cache_control": {}}
    [shown] = _parse(MESSAGES, [HI], tools=[described]).tools
    assert shown == {
        "type": "function",
        "function": {k: full[k] for k in ("name", "description", "parameters")},
    }


@pytest.mark.parametrize(
    "dialect, fields, options",
    [
        (CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        (CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (RESPONSES, {"reasoning": {"effort": "max"}}, {"reasoning_effort": "max", "enable_thinking": True}),
        (RESPONSES, {"reasoning": {"effort": None}}, {}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {}),
        (
            MESSAGES,
            {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
        (
            MESSAGES,
            {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        (
            CHAT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"reasoning_effort": "low", "enable_thinking": False, "x": 1},
        ),
    ],
)
def test_an_effort_of_reasoning_is_given_to_the_template(
    dialect: Dialect, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert _parse(dialect, [HI], **fields).template_options == options


def test_the_header_of_claude_code_is_taken_out_wherever_a_gateway_puts_it() -> None:
    header = "x-anthropic-billing-header: cch=1;"
    parts = [{"type": "text", "text": header}, {"type": "text", "text": f"{header}\nbe brief"}]
    brief = {"role": "system", "content": "be brief"}
    cases: list[tuple[Dialect, dict[str, Any], list[Any]]] = [
        (CHAT, {}, [{"role": "system", "content": f"{header}\nbe brief"}, HI]),
        (CHAT, {}, [{"role": "system", "content": parts}, HI]),
        (RESPONSES, {"instructions": f"{header}\nbe brief"}, [HI]),
        (MESSAGES, {"system": parts}, [HI]),
        (MESSAGES, {}, [{"role": "system", "content": parts}, HI]),
    ]
    for dialect, fields, history in cases:
        cleaned = normalise({FIELDS[dialect.name]: history, **fields}, ["billing_header"])
        given = cleaned.pop(FIELDS[dialect.name])
        assert _said(dialect, given, **cleaned) == [brief, HI]
    said = {"messages": [{"role": "user", "content": header}]}
    assert normalise(said, ["billing_header"]) == said
