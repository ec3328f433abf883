"""The OpenAI Chat Completions dialect."""

from __future__ import annotations

from typing import Any

import msgspec

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.chat.json_text import json_type_name
from sf_core.dataplane.chat.messages import LeftOut, Message, read_content, read_result, tool_call
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import WrongField
from sf_core.dataplane.gateway.dialects.checks import (
    MAX_TOOLS,
    Body,
    answer_schema,
    check_conversation,
    check_count,
    function_tool,
    get_field,
    parse_arguments,
    parse_stop,
    positive_int,
    read_sampling,
    template_options,
)
from sf_core.dataplane.gateway.dialects.openai import ChoicesReply, OpenAI, logprob_entries, read_choice
from sf_core.dataplane.gateway.dialects.protocol import MAX_TURNS
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, MadeCall, Pieces, TokenLogprob
from sf_core.dataplane.turns.request import TurnRequest

ROLES = ("system", "developer", "user", "assistant", "tool")


class Chat(OpenAI):
    name = "chat"
    paths: tuple[str, ...] = ("/v1/chat/completions",)
    schema_fields = frozenset({"response_format"})

    def parse(self, body: Body, session: Session, is_multimodal: bool = False) -> list[TurnRequest]:
        choice = body.get("tool_choice")
        function = choice.get("function") if isinstance(choice, dict) else None
        function_name = function.get("name") if isinstance(function, dict) else None
        tool_choice, tools = read_choice(body, _parse_tools(body.get("tools")), function_name)
        max_completion_tokens = positive_int(body, "max_completion_tokens")
        left_out = LeftOut(is_multimodal)
        get_field(body, "stream_options", (dict,), {})
        return [
            TurnRequest(
                messages=check_conversation(_parse_messages(body.get("messages"), left_out), "messages"),
                tools=tools,
                template_options=template_options(body, body.get("reasoning_effort")),
                tool_choice=tool_choice,
                schema=answer_schema(body, "response_format"),
                stop=parse_stop(body),
                max_tokens=(
                    positive_int(body, "max_tokens")
                    if max_completion_tokens is None
                    else max_completion_tokens
                ),
                sampling=read_sampling(body),
                seed=get_field(body, "seed", (int,), None),
                num_samples=positive_int(body, "n", MAX_TURNS) or 1,
                stream=get_field(body, "stream", (bool,), False),
                logprobs=get_field(body, "logprobs", (bool,), False),
                left_out=left_out,
            )
        ]

    def reply(self, body: Body, turn_id: str, session: Session) -> ChatReply:
        return ChatReply(f"chatcmpl-{turn_id}", body)


class ChatReply(ChoicesReply):
    chunk_kind = "chat.completion.chunk"

    def __init__(self, reply_id: str, body: Body) -> None:
        super().__init__(reply_id, body)
        self._num_calls = [0] * self._num_samples

    def whole(self, answers: list[Answer]) -> bytes:
        choices = [
            {
                "index": i,
                "message": {**_message(answer), "refusal": None},
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(answer.logprobs),
            }
            for i, answer in enumerate(answers)
        ]
        body = {"object": "chat.completion", "choices": choices, "usage": self._usage(answers)}
        return msgspec.json.encode(self._head | body)

    def start(self, num_prompt_tokens: int) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._delta(i, first) for i in range(len(self._num_calls)))

    def piece(self, index: int, pieces: Pieces) -> bytes:
        data = b""
        logprobs = pieces.logprobs
        for event in pieces.events:
            if isinstance(event, MadeCall):
                call = {"index": self._num_calls[index], **_call(event)}
                self._num_calls[index] += 1
                data += self._delta(index, {"tool_calls": [call]}, logprobs=logprobs)
            elif isinstance(event, Reasoning):
                data += self._delta(index, {"reasoning_content": event.text}, logprobs=logprobs)
            else:
                data += self._delta(index, {"content": event}, logprobs=logprobs)
            logprobs = None
        return data + (self._delta(index, {"content": ""}, logprobs=logprobs) if logprobs else b"")

    def end_turn(self, index: int, answer: Answer) -> bytes:
        return self._delta(index, {}, answer.finish_reason)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": _logprobs(logprobs),
        }
        return self._chunk([choice])


def _parse_tools(tools: Any) -> list[Tool]:
    if not tools:
        return []
    if not isinstance(tools, list):
        raise WrongField("tools", f"tools must be a list, got {json_type_name(tools)}")
    check_count(tools, "tools", MAX_TOOLS, "tools")
    parsed = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise WrongField(f"tools[{i}]", f"tools[{i}] must be a function with a name")
        parsed.append(function_tool(function))
    return parsed


def _parse_messages(messages: Any, left_out: LeftOut) -> list[Message]:
    if not isinstance(messages, list):
        raise WrongField("messages", f"messages must be a list, got {json_type_name(messages)}")
    return [_parse_message(message, f"messages[{i}]", left_out) for i, message in enumerate(messages)]


def _parse_message(message: Any, where: str, left_out: LeftOut) -> Message:
    """The canonical message: it holds only the parts that a model can see, and is equal for equivalent
    messages."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise WrongField(where, f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
    parsed: Message = {"role": message["role"]}
    if message["role"] == "tool":
        parsed["content"] = read_result(message.get("content"), f"{where}.content", left_out)
        parsed["tool_call_id"] = message.get("tool_call_id")
    else:
        may_have_pictures = message["role"] == "user"
        pictures_in = left_out if may_have_pictures else None
        parsed["content"] = read_content(message.get("content"), f"{where}.content", pictures_in)
    if message["role"] == "assistant":
        for name in ("reasoning", "reasoning_content"):
            if isinstance(message.get(name), str):
                parsed["reasoning_content"] = message[name]
                break
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise WrongField(where, f"{where}.tool_calls must be a list, got {json_type_name(calls)}")
            parsed["tool_calls"] = [
                _parse_call(call, f"{where}.tool_calls[{i}]", left_out) for i, call in enumerate(calls)
            ]
    if isinstance(message.get("name"), str):
        parsed["name"] = message["name"]
    return parsed


def _parse_call(call: Any, where: str, left_out: LeftOut) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise WrongField(where, f"{where} must have an id and a function with a name")
    arguments = parse_arguments(function.get("arguments"), left_out)
    return tool_call(str(call.get("id")), function["name"], arguments)


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls := answer.calls:
        message |= {"content": answer.content or None, "tool_calls": [_call(call) for call in calls]}
    return message


def _call(call: MadeCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _logprobs(entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": logprob_entries(entries), "refusal": None}
