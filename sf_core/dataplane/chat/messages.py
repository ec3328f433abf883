"""Messages in canonical form, and their identity.

A canonical message holds only the parts that a model can see, in one spelling: absent content is "", several
parts of text, and images, are a list of parts, arguments of tool calls are mappings. Dialects produce it,
templates render it, sessions compare it. A recorded answer is recognised without its reasoning, in one part,
without the `name` that agents give to answers they send back, and without ids of its calls: clients change
all of these. In other assistant messages they count.

The contents of messages, as clients send them, in canonical form (messages.py).
"""

from __future__ import annotations

import sys
from base64 import b32encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from sf_core.dataplane.chat.json_text import (
    MAX_VALUES,
    count_marks,
    count_values,
    encode_sorted,
    json_type_name,
)
from sf_core.dataplane.chat.tool_formats import Tool, ToolCall
from sf_core.dataplane.errors import ApiError, WrongField

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


Part = dict[str, Any]
"""`{"type": "text", "text": ...}` or `{"type": "image", "sha256": ..., "width": ..., "height": ...}`."""

Content = str | list[Part]
"""One text, or parts if a message has several or shows images."""

IMAGE = "image"
"""Kind of a part with an image, in canonical form, prompts and counters."""

TEXT_FIELD_BY_TYPE = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of parts that are text, and the field that holds the text."""

KIND_BY_TYPE = {
    **dict.fromkeys(("image", "image_url", "input_image"), IMAGE),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
    "tool_reference": "tool_reference",
    "search_result": "search_result",
}
"""Kinds of parts of other types, as prompts and counters name them."""

UNKNOWN_KIND = "part"
"""Kind of a part of an unknown type."""

MEDIA_FIELDS = ("inline_data", "file_data")
"""Fields of Google's parts that hold media."""

_KIND_BY_MIME_TYPE = {
    **dict.fromkeys(("application", "text"), "document"),
    **{kind: kind for kind in (IMAGE, "audio", "video")},
}
"""Kinds of media, by the first half of the MIME type."""

CHARACTERS = "characters"
"""Kind under which characters are counted that a client cut in half."""

PLACEHOLDERS = "placeholders"
"""Kind under which texts are counted that spell the placeholder of images."""


class SentImage(NamedTuple):
    """An image that the model is shown, as the client sent it."""

    where: str
    data: str
    """Base64, possibly with the letters of URLs."""
    part: Part
    """The part that shows the image, to which media.py of the data plane adds the facts."""


@dataclass(slots=True)
class LeftOut:
    """Parts of a request that the model is not shown, and the images that it is shown."""

    is_multimodal: bool = False
    """Whether the model is shown images."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of the parts that were left out: names of counters."""
    unseen: list[str] = field(default_factory=list)
    """Paths of the parts of tool results that the model is not shown."""
    images: list[SentImage] = field(default_factory=list)
    _uncounted: list[bytes] = field(default_factory=list)
    """Arguments of calls, as JSON, of whose values only an upper bound is known."""
    _num_values: int = 0
    """Number of values in the arguments so far, with upper bounds for those that were not counted."""

    def count_arguments(self, text: str) -> None:
        """Raises ApiError if the arguments of the request's calls hold too many values together."""
        self._uncounted.append(text.encode())
        self._num_values += count_marks(self._uncounted[-1])
        if self._num_values > MAX_VALUES:
            self._num_values += sum(count_values(json) - count_marks(json) for json in self._uncounted)
            self._uncounted.clear()
        if self._num_values > MAX_VALUES:
            raise too_many_values("The arguments of the tool calls")

    def omit(self, kind: str, where: str) -> str:
        """Leave a part of a tool result out, and return the text that the model sees instead."""
        self.kinds.append(kind)
        self.unseen.append(where)
        return f"[{kind.replace('_', ' ')} left out]"

    def add_image(self, data: str, where: str) -> Part:
        part = {"type": IMAGE}
        self.images.append(SentImage(where, data, part))
        return part


def too_many_values(subject: str) -> ApiError:
    return ApiError(
        400, f"{subject} must hold at most {MAX_VALUES} values: send fewer, or put long lists into texts."
    )


def has_media(part: dict[str, Any]) -> bool:
    """Whether a part of Google's has one of the fields in MEDIA_FIELDS."""
    return any(name in part for name in MEDIA_FIELDS)


def kind_of_media(part: Any) -> str:
    """Kind of a part of Google's that is not text."""
    if not isinstance(part, dict):
        return UNKNOWN_KIND
    for name in MEDIA_FIELDS:
        media = part.get(name)
        if isinstance(media, dict):
            kind, _, _ = str(media.get("mime_type")).partition("/")
            return _KIND_BY_MIME_TYPE.get(kind, UNKNOWN_KIND)
    return UNKNOWN_KIND


def read_media(part: Any, where: str, left_out: LeftOut) -> str | Part:
    """The image of a part of Google's, or the text that replaces media that the model is not shown."""
    kind = kind_of_media(part)
    if kind != IMAGE or not left_out.is_multimodal:
        return left_out.omit(kind, where)
    inline = part.get("inline_data")
    data = inline.get("data") if isinstance(inline, dict) else None
    if not isinstance(data, str):
        raise image_without_data(where)
    return left_out.add_image(data, where)


def read_texts(content: Any, where: str) -> list[str]:
    """The texts of a string or a list of parts; absent content has no texts. Raises ApiError for parts that
    are not text."""
    return [_text_of_part(part, where) for part in _list_parts(content, where)]


def read_parts(content: Any, where: str, left_out: LeftOut) -> list[str | Part]:
    """The texts and, for a model that is shown images, also the images."""
    return [
        read_image(part, f"{where}[{i}]", left_out)
        if left_out.is_multimodal and _kind_of_part(part) == IMAGE
        else _text_of_part(part, where)
        for i, part in enumerate(_list_parts(content, where))
    ]


def _list_parts(content: Any, where: str) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise WrongField(where, f"{where} must be a string or a list of parts, got {json_type_name(content)}")
    return content


def _kind_of_part(part: Any) -> str:
    """Kind of a part that is not text; empty for text."""
    if isinstance(part, str):
        return ""
    kind = str(part.get("type", "text")) if isinstance(part, dict) else UNKNOWN_KIND
    return "" if kind in TEXT_FIELD_BY_TYPE else KIND_BY_TYPE.get(kind, UNKNOWN_KIND)


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if _kind_of_part(part):
        raise WrongField(where, f"{where} has a part that is not text; only text is supported")
    text = part.get(TEXT_FIELD_BY_TYPE[part.get("type", "text")])
    if not isinstance(text, str):
        raise WrongField(where, f"{where} has a part without text")
    return text


def read_image(part: dict[str, Any], where: str, left_out: LeftOut) -> Part:
    """A part with an image, in the form of any API that has such parts."""
    source = part.get("image_url") or part.get("source") or part
    if not isinstance(source, dict):
        source = {"url": source}
    data = source.get("data")
    url = source.get("url")
    if isinstance(url, str) and url.startswith("data:"):
        head, _, data = url.partition(",")
        data = data if head.endswith(";base64") else None
    if not isinstance(data, str):
        raise image_without_data(where)
    return left_out.add_image(data, where)


def image_without_data(where: str) -> WrongField:
    return WrongField(
        where,
        f"{where} has an image whose bytes are not in the request: send the image as base64, in a field "
        "for URLs as a data URL; images are not downloaded, and files cannot be uploaded",
    )


def read_content(content: Any, where: str, left_out: LeftOut | None = None) -> Content:
    """The canonical content of a message that is not a tool result. It may have images if `left_out` is
    given. Raises ApiError."""
    if isinstance(content, str):
        return content
    return canonical(read_parts(content, where, left_out) if left_out else read_texts(content, where))


def canonical(parts: Sequence[str | Part]) -> Content:
    """The canonical content of these texts and images: a string for a single text, else a list of parts."""
    if len(parts) < 2 and all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def join_texts(content: Content, between: str = "") -> str:
    """All text of a canonical content."""
    if isinstance(content, str):
        return content
    return between.join(part["text"] for part in content if part["type"] == "text")


def image_parts_of(content: Content) -> Iterator[Part]:
    """The parts of a canonical content that show images."""
    if not isinstance(content, str):
        yield from (part for part in content if part["type"] == IMAGE)


def read_result(content: Any, where: str, left_out: LeftOut) -> Content:
    """The content of a tool result: a single text, unless it has images."""
    parts = []
    for part in _list_parts(content, where):
        kind = _kind_of_part(part)
        is_shown = not kind or (kind == IMAGE and left_out.is_multimodal)
        parts.append(part if is_shown else left_out.omit(kind, where))
    return join_result(read_parts(parts, where, left_out))


def join_result(parts: Sequence[str | Part]) -> Content:
    """The content of a tool result with these parts: texts are joined by line ends, if there are no
    images."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else canonical(parts)
