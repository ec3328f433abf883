"""Finds calls that begin with a mark, anywhere in an answer that arrives in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sf_core.dataplane.chat.tool_formats import Parts, ToolCall, overlap

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"


class ParsedCalls(NamedTuple):
    length: int
    """Length of the text of the calls."""
    calls: list[ToolCall] | None
    """None: the text is not a call."""


Read = Callable[[str, bool], ParsedCalls | None]
"""Parses the calls with which a text begins; None: the result depends on later text. The flag tells that no
more text will come."""


class MarkedCalls:
    """If `read` returns a result for a text, it must return the same result for every longer text."""

    def __init__(self, read: Read, *marks: str, closing: str = "") -> None:
        """`closing`: each call ends with one of these characters, so a text without them need not be
        parsed."""
        self._read = read
        self._marks = marks
        self._closing = closing
        self._text = ""
        self.num_unparsed = 0

    def push(self, text: str) -> Parts:
        was_open = self._text.startswith(self._marks)
        self._text += text
        if was_open and self._closing and not any(character in text for character in self._closing):
            return []
        return self._split(is_whole=False)

    def finish(self) -> Parts:
        parts = self._split(is_whole=True)
        parts.append(self._text)
        self._text = ""
        return parts

    def _split(self, *, is_whole: bool) -> Parts:
        parts: Parts = []
        while (start := self._find_mark()) is not None:
            parts.append(self._text[:start])
            self._text = self._text[start:]
            result = self._read(self._text, is_whole)
            if result is None:
                return parts
            length, calls = result
            self.num_unparsed += calls is None
            parts += [self._text[:length]] if calls is None else calls
            self._text = self._text[length:]
        # a mark may begin at the end of the text
        certain = len(self._text) - max(overlap(self._text, mark) for mark in self._marks)
        parts.append(self._text[:certain])
        self._text = self._text[certain:]
        return parts

    def _find_mark(self) -> int | None:
        return min((at for mark in self._marks if (at := self._text.find(mark)) >= 0), default=None)


def read_between_tags(parse: Callable[[str], ToolCall | None], *, shows_end: bool = False) -> Read:
    """A parser of calls between `<tool_call>` and `</tool_call>`. `shows_end`: an incomplete call does not
    parse, so the last call needs no closing tag."""

    def read(text: str, is_whole: bool) -> ParsedCalls | None:
        if (end := text.find(CALL_END)) >= 0:
            length = end + len(CALL_END)
            inside = text[len(CALL_START) : end]
        elif not is_whole:
            return None
        elif shows_end:
            length = len(text)
            inside = text[len(CALL_START) : len(text) - overlap(text, CALL_END)]
        else:
            return ParsedCalls(len(text), None)
        call = parse(inside)
        return ParsedCalls(length, None if call is None else [call])

    return read
