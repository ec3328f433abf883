"""The contents of messages, as clients send them, in canonical form (messages.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sf_core.dataplane.chat.json_text import MAX_VALUES, count_marks, count_values, kind_of
from sf_core.dataplane.errors import ApiError, WrongField

Part = dict[str, Any]
"""`{"type": "text", "text": ...}` or `{"type": "image", "sha256": ..., "width": ..., "height": ...}`."""

Content = str | list[Part]
"""One text, or parts if a message has several or shows pictures."""

IMAGE = "image"
"""What a part with a picture is, in canonical form and in the words of prompts and counters."""

TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of parts that are text, and the field that holds it."""

KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image"), IMAGE),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
    "tool_reference": "tool_reference",
    "search_result": "search_result",
}
"""What parts of other types are, in the words of prompts and counters."""

OTHER = "part"
"""What a part of an unknown type is."""

MEDIA = ("inline_data", "file_data")
"""Fields of Google's parts that are no text."""

_KINDS_OF_MEDIA = {
    **dict.fromkeys(("application", "text"), "document"),
    **{kind: kind for kind in (IMAGE, "audio", "video")},
}
"""What they are, by the beginnings of MIME types."""

CHARACTERS = "characters"
"""What the halves of characters are that a client cut."""


PLACEHOLDERS = "placeholders"
"""What texts are that spell the placeholder of pictures."""


class SentPicture(NamedTuple):
    """A picture as a client sent it, which the model is shown."""

    where: str
    data: str
    """Base64, also with the letters of URLs."""
    part: Part
    """The part that shows it, still without its facts (media/media.py)."""


@dataclass(slots=True)
class LeftOut:
    """What a request has and the model is not shown, and the pictures that it is shown."""

    sees: bool = False
    """The model is shown pictures."""
    kinds: list[str] = field(default_factory=list)
    """Names of counters."""
    unseen: list[str] = field(default_factory=list)
    """Places of the parts of tool results that the model is not shown."""
    pictures: list[SentPicture] = field(default_factory=list)
    _uncounted: list[bytes] = field(default_factory=list)
    """Arguments of calls, as JSON, whose values were not counted."""
    _num_values: int = 0
    """Values in the arguments so far; in those that were not counted at most as many as they have marks."""

    def count_arguments(self, text: str) -> None:
        """Raises ApiError if the arguments of the request's calls hold too many values together."""
        self._uncounted.append(text.encode())
        self._num_values += count_marks(self._uncounted[-1])
        if self._num_values > MAX_VALUES:
            self._num_values += sum(count_values(one) - count_marks(one) for one in self._uncounted)
            self._uncounted.clear()
        if self._num_values > MAX_VALUES:
            raise too_many_values("The arguments of the tool calls")

    def sentence(self, kind: str, where: str) -> str:
        """What the model sees in place of a part of a tool result."""
        self.kinds.append(kind)
        self.unseen.append(where)
        return f"[{kind.replace('_', ' ')} left out]"

    def picture(self, data: str, where: str) -> Part:
        part = {"type": IMAGE}
        self.pictures.append(SentPicture(where, data, part))
        return part


def too_many_values(subject: str) -> ApiError:
    return ApiError(
        400, f"{subject} must hold at most {MAX_VALUES} values: send fewer, or put long lists into texts."
    )


def has_media(part: dict[str, Any]) -> bool:
    """Whether a part of Google's has one of the fields in MEDIA."""
    return any(name in part for name in MEDIA)


def kind_of_media(part: Any) -> str:
    """What a part of Google's is that is no text."""
    if not isinstance(part, dict):
        return OTHER
    for name in MEDIA:
        media = part.get(name)
        if isinstance(media, dict):
            kind, _, _ = str(media.get("mime_type")).partition("/")
            return _KINDS_OF_MEDIA.get(kind, OTHER)
    return OTHER


def read_media(part: Any, where: str, left_out: LeftOut) -> str | Part:
    """The picture that a part of Google's shows, or a sentence in its place if the model is not shown it."""
    kind = kind_of_media(part)
    if kind != IMAGE or not left_out.sees:
        return left_out.sentence(kind, where)
    held = part.get("inline_data")
    data = held.get("data") if isinstance(held, dict) else None
    if not isinstance(data, str):
        raise unread_picture(where)
    return left_out.picture(data, where)


def read_texts(content: Any, where: str) -> list[str]:
    """The texts of a string or a list of parts; absent content has none. Raises ApiError for parts that are
    no text."""
    return [_text(part, where) for part in _list_parts(content, where)]


def read_parts(content: Any, where: str, left_out: LeftOut) -> list[str | Part]:
    """The same with the pictures, for a model that sees."""
    return [
        read_picture(part, f"{where}[{i}]", left_out)
        if left_out.sees and _kind(part) == IMAGE
        else _text(part, where)
        for i, part in enumerate(_list_parts(content, where))
    ]


def _list_parts(content: Any, where: str) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise WrongField(where, f"{where} must be a string or a list of parts, got {kind_of(content)}")
    return content


def _kind(part: Any) -> str:
    """What a part is that is no text; empty for a text."""
    if isinstance(part, str):
        return ""
    kind = str(part.get("type", "text")) if isinstance(part, dict) else OTHER
    return "" if kind in TEXTS else KINDS.get(kind, OTHER)


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if _kind(part):
        raise WrongField(where, f"{where} has a part that is not text; only text is supported")
    text = part.get(TEXTS[part.get("type", "text")])
    if not isinstance(text, str):
        raise WrongField(where, f"{where} has a part without text")
    return text


def read_picture(part: dict[str, Any], where: str, left_out: LeftOut) -> Part:
    """A part with a picture, in the form of any API that has such parts."""
    held = part.get("image_url") or part.get("source") or part
    held = held if isinstance(held, dict) else {"url": held}
    data = held.get("data")
    url = held.get("url")
    if isinstance(url, str) and url.startswith("data:"):
        head, _, data = url.partition(",")
        data = data if head.endswith(";base64") else None
    if not isinstance(data, str):
        raise unread_picture(where)
    return left_out.picture(data, where)


def unread_picture(where: str) -> WrongField:
    return WrongField(
        where,
        f"{where} has a picture whose bytes are not in the request: send the picture as base64, in a field "
        "for URLs as a data URL; pictures are not downloaded, and files cannot be uploaded",
    )


def read_content(content: Any, where: str, left_out: LeftOut | None = None) -> Content:
    """The canonical content of a message that is no tool result, with pictures if there is a `left_out`.
    Raises ApiError."""
    if isinstance(content, str):
        return content
    return canonical(read_parts(content, where, left_out) if left_out else read_texts(content, where))


def canonical(found: Sequence[str | Part]) -> Content:
    if len(found) < 2 and all(isinstance(one, str) for one in found):
        return "".join(map(str, found))
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in found]


def join_texts(content: Content, between: str = "") -> str:
    """All text of a canonical content."""
    if isinstance(content, str):
        return content
    return between.join(part["text"] for part in content if part["type"] == "text")


def pictures_of(content: Content) -> Iterator[Part]:
    """The parts of a canonical content that show pictures."""
    if not isinstance(content, str):
        yield from (part for part in content if part["type"] == IMAGE)


def read_result(content: Any, where: str, left_out: LeftOut) -> Content:
    """The content of a tool result: one text, unless it shows pictures."""
    parts = _list_parts(content, where)
    shown = [
        left_out.sentence(kind, where)
        if (kind := _kind(part)) and not (left_out.sees and kind == IMAGE)
        else part
        for part in parts
    ]
    return join_result(read_parts(shown, where, left_out))


def join_result(found: Sequence[str | Part]) -> Content:
    texts = [one for one in found if isinstance(one, str)]
    return "\n".join(texts) if len(texts) == len(found) else canonical(found)
