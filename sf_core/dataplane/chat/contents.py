"""The contents of messages, as clients send them, in canonical form (messages.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sf_core.dataplane.chat.json_text import kind_of
from sf_core.dataplane.errors import WrongField

Content = str | list[dict[str, str]]
"""One text, or parts `{"type": "text", "text": ...}` if a message has several."""

TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of parts that are text, and the field that holds it."""

KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
    "tool_reference": "tool_reference",
    "search_result": "search_result",
}
"""What parts of other types are, in the words of prompts and counters."""

OTHER = "part"
"""What a part of an unknown type is."""

_MEDIA = {"application": "document", "text": "document", "image": "image", "audio": "audio", "video": "video"}
"""The same for the beginnings of MIME types."""

CHARACTERS = "characters"
"""What the halves of characters are that a client cut."""


@dataclass(slots=True)
class LeftOut:
    """What a request has and the model is not shown."""

    kinds: list[str] = field(default_factory=list)
    """Names of counters."""
    unseen: list[str] = field(default_factory=list)
    """Places of the parts of tool results that are no text."""

    def sentence(self, kind: str, where: str) -> str:
        """What the model sees in place of a part of a tool result."""
        self.kinds.append(kind)
        self.unseen.append(where)
        return f"[{kind.replace('_', ' ')} left out]"


def kind_of_media(mime_type: str) -> str:
    return _MEDIA.get(mime_type.partition("/")[0], OTHER)


def read_texts(content: Any, where: str, left_out: LeftOut | None = None) -> list[str]:
    """The texts of a string or a list of parts; absent content has none. Raises ApiError for parts that are
    no text, or with `left_out` puts a sentence in their place."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise WrongField(where, f"{where} must be a string or a list of parts, got {kind_of(content)}")
    return [_text(part, where, left_out) for part in content]


def _text(part: Any, where: str, left_out: LeftOut | None) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type", "text")) if isinstance(part, dict) else ""
    if kind not in TEXTS:
        if left_out is not None:
            return left_out.sentence(KINDS.get(kind, OTHER), where)
        raise WrongField(where, f"{where} has a part that is not text; only text is supported")
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise WrongField(where, f"{where} has a part without text")
    return text


def read_content(content: Any, where: str) -> Content:
    """The canonical content of a message that is no tool result. Raises ApiError."""
    return content if isinstance(content, str) else canonical(read_texts(content, where))


def canonical(found: list[str]) -> Content:
    return [{"type": "text", "text": text} for text in found] if len(found) > 1 else "".join(found)


def join_texts(content: Content, between: str = "") -> str:
    """All text of a canonical content."""
    return content if isinstance(content, str) else between.join(part["text"] for part in content)


def read_result(content: Any, where: str, left_out: LeftOut) -> str:
    """The content of a tool result, of which chat templates take one text."""
    return "\n".join(read_texts(content, where, left_out))
