"""The OpenAI Responses dialect, parsing: the model's items between two inputs become one assistant message.

`previous_response_id` names an answer of the same session, and is valid as long as the session.
"""

from __future__ import annotations

import re
from typing import Any

from sf_core.dataplane.chat.json_text import json_type_name
from sf_core.dataplane.chat.messages import LeftOut, Message, join_texts, read_content, read_result
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.gateway.dialects.checks import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    Body,
    answer_schema,
    check_conversation,
    check_count,
    check_size,
    function_tool,
    get_field,
    parse_arguments,
    positive_int,
    read_sampling,
    refuse_unless,
    template_options,
)
from sf_core.dataplane.gateway.dialects.openai import OVERFLOW, OpenAI, read_choice
from sf_core.dataplane.gateway.dialects.responses_reply import ECHOED, ResponsesReply
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.request import TurnRequest

LOGPROBS = "message.output_text.logprobs"

_WITH_INSTRUCTIONS = "~i"
"""Suffix of the id of a response whose first message is its instructions, which do not carry over."""
_NOT_STORED = "~n"
"""Suffix of the id of a response that no later request may name."""

_LATER_TEXTS = "more"
"""Temporary key of a message for the texts of an answer that come after its calls."""

_ITEM_ID = re.compile(r"(?P<kind>rs|msg|fc)_(?P<turn>.+)\.\d+")
"""Id of an item of a response (responses_reply.py)."""

MAX_ECHOED_BYTES = 2**18
"""Most bytes, as JSON, of a field that the response repeats. A stream repeats it three times."""

MAX_ECHOED = {"instructions": 2**20, "tools": MAX_TOOLS_BYTES}
"""The same limit for fields that may be long."""

MAX_REFERENCES = 1024
"""Most references of a request to items of earlier responses: each has a few bytes, but may stand for
megabytes."""

MAX_RECALLED = 8 * 2**20
"""Most characters of a conversation whose text the request refers to."""

LEFT_OUT = ("web_search", "web_search_preview", "namespace", "tool_search", "image_generation")
"""Types of tools that clients always send, and that a provider would run itself: the model is not shown them,
and they are counted."""


class Responses(OpenAI):
    name = "responses"
    paths: tuple[str, ...] = ("/v1/responses",)
    schema_fields = frozenset({"text.format"})
    # LiteLLM recognises only the sentence of Chat Completions
    overflow = f"Your input exceeds the context window of this model. {OVERFLOW}", "input"

    def parse(self, body: Body, session: Session, is_multimodal: bool = False) -> list[TurnRequest]:
        refuse_unless(body, "prompt", "stored prompts are not supported; use instructions")
        get_field(body, "text", (dict,), {})
        sent_tools = get_field(body, "tools", (list,), [])
        check_count(sent_tools, "tools", MAX_TOOLS, "tools")
        for name in ECHOED:
            check_size(body.get(name), name, MAX_ECHOED.get(name, MAX_ECHOED_BYTES))
        left_out = LeftOut(is_multimodal, [tool["type"] for tool in sent_tools if _is_left_out(tool)])
        choice = body.get("tool_choice")
        function_name = choice.get("name") if isinstance(choice, dict) else None
        tool_choice, tools = read_choice(body, _parse_tools(sent_tools), function_name)
        instructions = get_field(body, "instructions", (str,), "")
        messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        messages += _previous_messages(body, session)
        messages += _parse_input(body.get("input"), session, left_out)
        _check_text(messages)
        return [
            TurnRequest(
                messages=check_conversation(messages, "input"),
                tools=tools,
                template_options=template_options(
                    body, get_field(body, "reasoning", (dict,), {}).get("effort")
                ),
                tool_choice=tool_choice,
                schema=answer_schema(body, "text.format"),
                max_tokens=positive_int(body, "max_output_tokens"),
                sampling=read_sampling(body),
                stream=get_field(body, "stream", (bool,), False),
                logprobs=LOGPROBS in get_field(body, "include", (list,), []),
                left_out=left_out,
            )
        ]

    def reply(self, body: Body, turn_id: str, session: Session) -> ResponsesReply:
        return ResponsesReply(turn_id, body, _response_id(turn_id, body))


def _response_id(turn_id: str, body: Body) -> str:
    """The id of a response. Its suffix tells how a later request continues from the turn, so that nothing
    else must be stored."""
    if body.get("store") is False:
        return f"resp_{turn_id}{_NOT_STORED}"
    return f"resp_{turn_id}{_WITH_INSTRUCTIONS if body.get('instructions') else ''}"


def _previous_messages(body: Body, session: Session) -> list[Message]:
    response_id = get_field(body, "previous_response_id", (str,), None)
    if response_id is None:
        return []
    turn = session.find_turn(response_id.removeprefix("resp_").removesuffix(_WITH_INSTRUCTIONS))
    if turn is None:
        raise ApiError(
            404,
            f"Response {response_id} is unknown in this session; if another session returned it, name that "
            "session in the URL, a header or the key.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    turns = list(turn.conversation())[::-1]
    messages = [message for turn in turns for message in (*turn.prompt.messages, turn.message)]
    return messages[1:] if response_id.endswith(_WITH_INSTRUCTIONS) else messages


def _parse_tools(tools: list[Any]) -> list[Tool]:
    parsed = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if _is_left_out(tool):
            continue
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else json_type_name(tool)
            raise WrongField(where, f"{where}: only functions are supported, not {kind}")
        if not isinstance(tool.get("name"), str):
            raise WrongField(where, f"{where} must have a name")
        parsed.append(function_tool(tool))
    return parsed


def _is_left_out(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in LEFT_OUT


def _parse_input(items: Any, session: Session, left_out: LeftOut) -> list[Message]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise WrongField("input", f"input must be a string or a list of items, got {json_type_name(items)}")
    messages: list[Message] = []
    item_references = [
        item for item in items if isinstance(item, dict) and item.get("type") == "item_reference"
    ]
    check_count(item_references, "input", MAX_REFERENCES, "item references")
    call_ids: set[str] = set()
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise WrongField(where, f"{where} must be an object, got {json_type_name(item)}")
        if item.get("type") == "item_reference":
            _recall(messages, call_ids, item.get("id"), session, where)
        elif item.get("type") == "additional_tools":
            left_out.kinds.append("additional_tools")
        else:
            _add_item(messages, call_ids, item, where, left_out)
    for message in messages:
        _join_texts(message)
    return messages


def _check_text(messages: list[Message]) -> None:
    num_characters = 0
    for message in messages:
        for text in (message["content"], message.get("reasoning_content")):
            if text:
                num_characters += len(text if isinstance(text, str) else join_texts(text))
    if num_characters > MAX_RECALLED:
        rule = f"the items that input refers to must have at most {MAX_RECALLED} characters together"
        raise WrongField("input", f"{rule}, got {num_characters}: refer to each item once")


def _recall(messages: list[Message], call_ids: set[str], item_id: Any, session: Session, where: str) -> None:
    """Add an item of an earlier response, by its id. References to the calls of an answer come in the order
    of the calls. The first reference to a text of an answer stands for all its texts. `call_ids`: ids of the
    calls so far."""
    match = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    turn = session.find_turn(match["turn"]) if match else None
    if match is None or turn is None:
        raise ApiError(
            404, f"{where}: item {item_id!r} is unknown in this session.", code="item_not_found", param=where
        )
    if match["kind"] == "msg":
        answer = {"role": "assistant", "content": turn.message["content"]}
        last = messages[-1] if messages else {}
        _join_texts(last)
        if last.get("role") != "assistant" or not join_texts(last["content"]).endswith(answer["content"]):
            _add_message(messages, answer, where, LeftOut())
    elif match["kind"] == "rs":
        _add_reasoning(messages, turn.message.get("reasoning_content", ""))
    elif match["kind"] == "fc":
        calls = turn.message.get("tool_calls", ())
        call = next((call for call in calls if call["id"] not in call_ids), None)
        if call is not None:
            call_ids.add(call["id"])
            _open_answer(messages).setdefault("tool_calls", []).append(call)


def _add_item(
    messages: list[Message], call_ids: set[str], item: dict[str, Any], where: str, left_out: LeftOut
) -> None:
    match item.get("type", "message"):
        case "reasoning":
            _add_reasoning(messages, _read_reasoning(item, where))
        case "message":
            _add_message(messages, item, where, left_out)
        case "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
                raise WrongField(where, f"{where} must have a name and a call_id")
            arguments = parse_arguments(item.get("arguments"), left_out)
            # in vLLM's order, which differs from the order in Chat Completions (chat/messages.py)
            function = {"name": item["name"], "arguments": arguments}
            call = {"id": item["call_id"], "function": function, "type": "function"}
            call_ids.add(call["id"])
            _open_answer(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = read_result(item.get("output"), f"{where}.output", left_out)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        case kind:
            raise WrongField(where, f"{where}: items of type {kind} are not supported")


def _add_message(messages: list[Message], item: dict[str, Any], where: str, left_out: LeftOut) -> None:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise WrongField(where, f"{where}.role must be system, developer, user or assistant, got {role!r}")
    content = read_content(item.get("content"), f"{where}.content", left_out if role == "user" else None)
    is_answer = role == "assistant"
    last = messages[-1] if messages else {}
    if is_answer and last.get("role") == role and not last["content"]:
        last["content"] = content
    elif is_answer and last.get("tool_calls"):
        # text after an unanswered call belongs to the same answer
        last.setdefault(_LATER_TEXTS, []).append(join_texts(content))
    else:
        message: Message = {"role": role, "content": content}
        if isinstance(item.get("name"), str):
            message["name"] = item["name"]
        messages.append(message)


def _join_texts(message: Message) -> None:
    """Join the texts that were added to an answer. Joined one by one, many texts would be copied many
    times."""
    if later_texts := message.pop(_LATER_TEXTS, None):
        message["content"] = "".join([join_texts(message["content"]), *later_texts])


def _read_reasoning(item: dict[str, Any], where: str) -> str:
    """The text of a reasoning item: of its content, or of its summary. As in vLLM, the first part counts."""
    parts = get_field(item, "content", (list,), []) or get_field(item, "summary", (list,), [])
    text = parts[0].get("text") if parts and isinstance(parts[0], dict) else ""
    if not isinstance(text, str):
        raise WrongField(where, f"{where} has a part without text")
    return text


def _add_reasoning(messages: list[Message], text: str) -> None:
    """Add reasoning to the last answer, or begin an answer with it if the last one has some."""
    if messages and "reasoning_content" in messages[-1]:
        messages.append({"role": "assistant", "content": ""})
    _open_answer(messages)["reasoning_content"] = text


def _open_answer(messages: list[Message]) -> Message:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
