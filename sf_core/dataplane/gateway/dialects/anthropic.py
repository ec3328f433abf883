"""The Anthropic Messages dialect."""

from __future__ import annotations

from typing import Any

import msgspec

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.chat.json_text import json_type_name
from sf_core.dataplane.chat.messages import (
    IMAGE,
    LeftOut,
    Message,
    Part,
    canonical,
    read_image,
    read_result,
    read_texts,
    tool_call,
)
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.gateway.dialects.checks import (
    MAX_TOOLS,
    Body,
    answer_schema,
    check_choice,
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
from sf_core.dataplane.gateway.dialects.protocol import CountRoutes, encode_event
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, MadeCall, Pieces
from sf_core.dataplane.turns.request import ToolChoice, TurnRequest

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
THREAD = "thread_unsupported_request"
"""Code from which Anthropic's packages know that they must send the whole conversation."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Anthropic:
    name = "messages"
    paths: tuple[str, ...] = ("/v1/messages",)
    count: CountRoutes | None = CountRoutes(("/v1/messages/count_tokens",), "input_tokens")
    schema_fields = frozenset({"output_config.format", "output_format"})
    done_fields: frozenset[str] = frozenset()
    has_ids = False
    header: bytes | None = b"anthropic-version"
    overflow = "prompt is too long: {tokens} tokens > {most} maximum. Please shorten the {param}.", "messages"

    def read(self, body: Body, path: str) -> Body:
        if body.get("thread") is not None:
            sentence = "thread is not supported: leave it out, and send the whole conversation in messages."
            raise ApiError(400, sentence, code=THREAD, param="thread")
        return body

    def parse(self, body: Body, session: Session, is_multimodal: bool = False) -> list[TurnRequest]:
        max_tokens = positive_int(body, "max_tokens")
        if max_tokens is None:
            raise WrongField("max_tokens", "max_tokens is required")
        tools = _parse_tools(get_field(body, "tools", (list,), []))
        left_out = LeftOut(is_multimodal)
        messages = _system_message(body.get("system"), "system")
        sent = get_field(body, "messages", (list,), [])
        if not sent:
            raise WrongField("messages", "messages must contain at least one message")
        for i, message in enumerate(sent):
            messages += _parse_message(message, f"messages[{i}]", left_out)
        if sent[-1]["role"] == "assistant":
            raise ApiError(
                400,
                "The last message must have the role user: the model cannot continue an answer that the "
                "request begins",
            )
        return [
            TurnRequest(
                messages=check_conversation(messages, "messages"),
                merges_system=True,
                tools=tools,
                template_options=template_options(body, _effort(body)),
                tool_choice=check_choice(_parse_choice(body), tools),
                schema=answer_schema(body, "output_config.format", "output_format"),
                stop=parse_stop(body, "stop_sequences"),
                max_tokens=max_tokens,
                sampling=read_sampling(body, positive_int(body, "top_k") or 0, max_temperature=1.0),
                stream=get_field(body, "stream", (bool,), False),
                left_out=left_out,
            )
        ]

    def reply(self, body: Body, turn_id: str, session: Session) -> AnthropicReply:
        return AnthropicReply(turn_id, body["model"])

    def error_body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        if error.status == 503 and error.retry_after_s is not None:
            kind = "overloaded_error"
        description: dict[str, Any] = {"type": kind, "message": error.message}
        if error.code == THREAD:
            description["details"] = {"error_code": THREAD}
        return {"type": "error", "error": description, "request_id": request_id}

    def model_entry(self, model: str) -> dict[str, Any]:
        return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}

    def model_list(self, models: list[str]) -> dict[str, Any]:
        entries = [self.model_entry(name) for name in models]
        first_id, last_id = (models[0], models[-1]) if models else (None, None)
        return {"data": entries, "has_more": False, "first_id": first_id, "last_id": last_id}


class AnthropicReply:
    def __init__(self, turn_id: str, model: str) -> None:
        self._head = {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "model": model}
        self._signature = f"signed_{turn_id}"
        """Signature of the reasoning: clients drop reasoning without a signature. Nobody verifies it."""
        self._num_blocks = 0
        self._open_type: str | None = None
        """Type of the block that is being streamed; None between blocks."""

    def whole(self, answers: list[Answer]) -> bytes:
        [answer] = answers
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": self._signature})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        content += [_tool_use(call, msgspec.json.decode(call.arguments)) for call in answer.calls]
        usage = _usage(answer.num_prompt_tokens, answer.num_sampled_tokens)
        return msgspec.json.encode(self._head | {"content": content, "usage": usage} | _describe_end(answer))

    def start(self, num_prompt_tokens: int) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._head | empty | {"usage": _usage(num_prompt_tokens, 0)}
        return encode_event({"type": "message_start", "message": message})

    def piece(self, index: int, pieces: Pieces) -> bytes:
        data = b""
        for event in pieces.events:
            if isinstance(event, MadeCall):
                data += self._begin_block("tool_use", _tool_use(event, {}))
                data += self._delta({"type": "input_json_delta", "partial_json": event.arguments})
                data += self._end_block()
            elif isinstance(event, Reasoning):
                data += self._begin_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                data += self._delta({"type": "thinking_delta", "thinking": event.text})
            else:
                data += self._begin_block("text", {"type": "text", "text": ""})
                data += self._delta({"type": "text_delta", "text": event})
        return data

    def end_turn(self, index: int, answer: Answer) -> bytes:
        usage = _usage(answer.num_prompt_tokens, answer.num_sampled_tokens)
        delta = {"type": "message_delta", "delta": _describe_end(answer), "usage": usage}
        return self._end_block() + encode_event(delta)

    def end(self, answers: list[Answer]) -> bytes:
        return encode_event({"type": "message_stop"})

    def fail(self, error: ApiError, request_id: str) -> bytes:
        return encode_event(Anthropic().error_body(error, request_id))

    def _begin_block(self, kind: str, block: dict[str, Any]) -> bytes:
        if kind == self._open_type:
            return b""
        ended = self._end_block()
        self._open_type = kind
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return ended + encode_event(start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return encode_event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _end_block(self) -> bytes:
        if self._open_type is None:
            return b""
        signature = {"type": "signature_delta", "signature": self._signature}
        signed = self._delta(signature) if self._open_type == "thinking" else b""
        self._open_type = None
        self._num_blocks += 1
        return signed + encode_event({"type": "content_block_stop", "index": self._num_blocks - 1})


def _parse_tools(tools: list[Any]) -> list[Tool]:
    check_count(tools, "tools", MAX_TOOLS, "tools")
    parsed = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise WrongField(where, f"{where} must be a tool with a name")
        if tool.get("type", "custom") != "custom":
            raise WrongField(where, f"{where}: tools of type {tool['type']} are not supported")
        schema = get_field(tool, "input_schema", (dict,), {"properties": {}})
        parsed.append(function_tool(tool | {"parameters": {**schema, "type": schema.get("type", "object")}}))
    return parsed


def _effort(body: Body) -> Any:
    """The effort of reasoning. As in vLLM, disabled `thinking` is the effort `none`."""
    if get_field(body, "thinking", (dict,), {}).get("type") == "disabled":
        return "none"
    return get_field(body, "output_config", (dict,), {}).get("effort")


def _system_message(content: Any, where: str) -> list[Message]:
    text = "".join(read_texts(content, where))
    return [{"role": "system", "content": text}] if text else []


def _parse_choice(body: Body) -> ToolChoice:
    choice = get_field(body, "tool_choice", (dict,), {"type": "auto"})
    parallel = not choice.get("disable_parallel_tool_use")
    match choice.get("type"):
        case "auto" | "none" as kind:
            return ToolChoice(kind, None, parallel)
        case "any":
            return ToolChoice("required", None, parallel)
        case "tool" if isinstance(choice.get("name"), str):
            return ToolChoice("required", choice["name"], parallel)
    raise WrongField("tool_choice", "tool_choice.type must be auto, any, none, or tool with a name")


def _parse_message(message: Any, where: str, left_out: LeftOut) -> list[Message]:
    """Canonical messages of one message: the tool results of a user come first, as messages of their own.
    Empty blocks are no text."""
    role = message.get("role") if isinstance(message, dict) else message
    if role not in ("user", "assistant", "system"):
        raise WrongField(where, f"{where}.role must be user, assistant or system, got {role!r}")
    content = message.get("content")
    if role == "system":
        return _system_message(content, f"{where}.content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise WrongField(where, f"{where}.content must be a string or a list of blocks")
    blocks = [(block, f"{where}.content[{i}]") for i, block in enumerate(content)]
    parts = [part for block, at in blocks for part in _block_parts(block, role, at, left_out) if part]
    if role == "user":
        results = [
            _tool_result(block, at, left_out) for block, at in blocks if block["type"] == "tool_result"
        ]
        return [*results, *([{"role": "user", "content": canonical(parts)}] if parts else [])]
    answer: Message = {"role": role, "content": canonical(parts)}
    thoughts = [
        get_field(block, "thinking", (str,), "") for block, _ in blocks if block["type"] == "thinking"
    ]
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    calls = [_parse_call(block, at, left_out) for block, at in blocks if block["type"] == "tool_use"]
    if calls:
        answer["tool_calls"] = calls
    return [answer]


def _block_parts(block: Any, role: str, where: str, left_out: LeftOut) -> list[str | Part]:
    """The text or image of a block; empty for the other types of blocks that the role may have."""
    kind = block.get("type") if isinstance(block, dict) else json_type_name(block)
    without_parts = ("tool_result",) if role == "user" else ("tool_use", "thinking", "redacted_thinking")
    if kind in without_parts:
        return []
    if kind == IMAGE and role == "user" and left_out.is_multimodal:
        return [read_image(block, where, left_out)]
    if kind != "text":
        raise WrongField(where, f"{where}: {kind} blocks are not supported for {role}")
    return [*read_texts([block], where)]


def _tool_result(block: dict[str, Any], where: str, left_out: LeftOut) -> Message:
    content = read_result(block.get("content"), f"{where}.content", left_out)
    return {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}


def _parse_call(block: dict[str, Any], where: str, left_out: LeftOut) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("id"), str):
        raise WrongField(where, f"{where} must have a name and an id, both strings")
    return tool_call(block["id"], block["name"], parse_arguments(block.get("input"), left_out))


def _tool_use(call: MadeCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _describe_end(answer: Answer) -> dict[str, Any]:
    reason = STOP_REASONS[answer.finish_reason]
    if answer.stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(num_prompt_tokens: int, num_sampled_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": num_prompt_tokens,
        "output_tokens": num_sampled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
