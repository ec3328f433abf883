"""Messages in canonical form, and their identity.

A canonical message holds only the parts that a model can see, in one spelling: absent content is "", several
parts of text, and images, are a list of parts, arguments of tool calls are mappings. Dialects produce it,
templates render it, sessions compare it. A recorded answer is recognised without its reasoning, in one part,
without the `name` that agents give to answers they send back, and without ids of its calls: clients change
all of these. In other assistant messages they count.
"""

from __future__ import annotations

import sys
from base64 import b32encode
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from sf_core.dataplane.chat.contents import Part, image_parts_of, join_texts
from sf_core.dataplane.chat.json_text import encode_sorted
from sf_core.dataplane.chat.tool_formats import Tool, ToolCall

Message = dict[str, Any]


def assistant_message(content: str, calls: list[ToolCall], turn_id: str, reasoning: str = "") -> Message:
    """A sampled answer. The ids of its calls are derived from the turn, so equal calls of two turns have
    different ids."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            tool_call(call_id(turn_id, i), call.name, call.arguments) for i, call in enumerate(calls)
        ]
    return message


def call_id(turn_id: str, index: int) -> str:
    """Nine letters and digits: Mistral's templates refuse other ids."""
    return b32encode(blake2b(f"{turn_id}.{index}".encode(), digest_size=8).digest())[:9].decode().lower()


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    # in vLLM's order, which templates may show
    return {"id": call_id, "function": {"arguments": arguments, "name": name}, "type": "function"}


def text_of(message: Message) -> str:
    """The text of a message. As in vLLM, each part is on a line of its own."""
    return join_texts(message["content"], "\n")


def list_image_parts(messages: Iterable[Message]) -> list[Part]:
    """The parts of messages that show images, in order."""
    return [part for message in messages for part in image_parts_of(message["content"])]


def chain_keys(tools: list[Tool], messages: list[Message]) -> list[bytes]:
    """Chained hashes: of the tools, then of each message. Equal keys mean equal tools and messages so far."""
    keys = [blake2b(encode_sorted(tools), digest_size=16).digest()]
    for message in messages:
        keys.append(extend_chain(keys[-1], message))
    return keys


def extend_chain(key: bytes, message: Message) -> bytes:
    return blake2b(key + encode_sorted(message), digest_size=16).digest()


def comparable_answer(message: Message) -> Message:
    """An answer without its reasoning and name, in one part: the form in which recorded answers are
    recognised."""
    plain = {name: value for name, value in message.items() if name not in ("reasoning_content", "name")}
    return plain | {"content": join_texts(plain["content"])}


def without_ids(message: Message) -> Message:
    """An answer without the ids of its calls, which agents may replace when they send the answer back."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [call["function"] for call in message["tool_calls"]]}


def size_of(value: Any) -> int:
    """Approximate memory of a JSON value in bytes; keys are shared between values and not counted."""
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    return sys.getsizeof(value) + sum(map(size_of, inner))
