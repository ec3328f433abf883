"""The OpenAI Responses dialect, parsing: the model's items between two inputs become one assistant message.

`previous_response_id` names an answer of the same session, and is valid as long as the session.
"""

from __future__ import annotations

from typing import Any

from sf_core.dataplane.chat.messages import Message, tool_call
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import (
    Body,
    check_choice,
    check_conversation,
    get,
    join_text,
    kind_of,
    number,
    parse_arguments,
    positive,
    refuse,
    tool_choice,
    top_k,
)
from sf_core.dataplane.gateway.dialects.openai import OpenAI
from sf_core.dataplane.gateway.dialects.responses_reply import ResponsesReply
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.request import TurnRequest

TEXT_TYPES = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"

_INSTRUCTED = "~i"
"""Suffix of the id of a response whose first message is its instructions, which do not carry over."""
_NOT_STORED = "~n"
"""Suffix of the id of a response that no later request may name."""


class Responses(OpenAI):
    name = "responses"

    def parse(self, body: Body, session: Session) -> list[TurnRequest]:
        refuse(body, "prompt", "stored prompts are not supported; use instructions")
        text = get(body, "text", (dict,), {})
        refuse(text, "format", "text.format must be text", {"type": "text"})
        tools = _parse_tools(get(body, "tools", (list,), []))
        choice = body.get("tool_choice")
        named = choice.get("name") if isinstance(choice, dict) else None
        parallel = get(body, "parallel_tool_calls", (bool,), True)
        instructions = get(body, "instructions", (str,), "")
        messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        messages += _previous_messages(body, session) + _parse_input(body.get("input"))
        return [
            TurnRequest(
                messages=check_conversation(messages, "input"),
                tools=tools,
                tool_choice=check_choice(tool_choice(body, named, parallel), tools),
                max_tokens=positive(body, "max_output_tokens"),
                temperature=number(body, "temperature", 1.0, 0.0, 2.0),
                top_p=number(body, "top_p", 1.0, 0.0, 1.0),
                top_k=top_k(body),
                stream=get(body, "stream", (bool,), False),
                logprobs=LOGPROBS in get(body, "include", (list,), []),
            )
        ]

    def reply(self, body: Body, turn_id: str, session: Session) -> ResponsesReply:
        return ResponsesReply(turn_id, body, _response_id(turn_id, body))


def _response_id(turn_id: str, body: Body) -> str:
    """The id of a response; it says how to go on from the turn, so that nothing else need be stored."""
    if body.get("store") is False:
        return f"resp_{turn_id}{_NOT_STORED}"
    return f"resp_{turn_id}{_INSTRUCTED if body.get('instructions') else ''}"


def _previous_messages(body: Body, session: Session) -> list[Message]:
    response_id = get(body, "previous_response_id", (str,), None)
    if response_id is None:
        return []
    turn = session.find_turn(response_id.removeprefix("resp_").removesuffix(_INSTRUCTED))
    if turn is None:
        raise ApiError(
            404,
            f"Response {response_id} is unknown in this session; name one by URL, header or key.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    turns = list(turn.conversation())[::-1]
    messages = [message for turn in turns for message in (*turn.prompt.messages, turn.message)]
    # reasoning is in the recorded ids (chat/messages.py)
    said = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
    return said[response_id.endswith(_INSTRUCTED) :]


def _parse_tools(tools: list[Any]) -> list[Tool]:
    parsed = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else kind_of(tool)
            raise ApiError(400, f"{where}: only functions are supported, not {kind}", param=where)
        if not isinstance(tool.get("name"), str):
            raise ApiError(400, f"{where} must have a name", param=where)
        keys = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        parsed.append({"type": "function", "function": function})
    return parsed


def _parse_input(items: Any) -> list[Message]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ApiError(400, f"input must be a string or a list of items, got {kind_of(items)}", param="input")
    messages: list[Message] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise ApiError(400, f"{where} must be an object, got {kind_of(item)}", param=where)
        _add_item(messages, item, where)
    return messages


def _add_item(messages: list[Message], item: dict[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "reasoning":
            pass
        case "message":
            _add_message(messages, item, where)
        case "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
                raise ApiError(400, f"{where} must have a name and a call_id", param=where)
            arguments = parse_arguments(item.get("arguments") or "{}", where)
            answer = _open_answer(messages)
            answer.setdefault("tool_calls", []).append(tool_call(item["call_id"], item["name"], arguments))
        case "function_call_output":
            content = join_text(item.get("output"), f"{where}.output", TEXT_TYPES)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        case kind:
            raise ApiError(400, f"{where}: items of type {kind} are not supported", param=where)


def _add_message(messages: list[Message], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise ApiError(
            400, f"{where}.role must be system, developer, user or assistant, got {role!r}", param=where
        )
    content = join_text(item.get("content"), f"{where}.content", TEXT_TYPES)
    if role == "assistant" and messages and messages[-1].get("tool_calls"):
        # text after an unanswered call belongs to the same answer
        messages[-1]["content"] += content
    else:
        messages.append({"role": role, "content": content})


def _open_answer(messages: list[Message]) -> Message:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
