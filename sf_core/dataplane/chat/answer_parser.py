"""Splits sampled text, as it arrives, into reasoning, content and tool calls; ends it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sf_core.dataplane.chat.tool_formats import CallSplitter, ToolCall, overlap

THINK_START = "<think>"
THINK_END = "</think>"


class Reasoning(NamedTuple):
    """A piece of the reasoning that a model writes before its answer."""

    text: str


AnswerParts = list[str | Reasoning | ToolCall]


class AnswerStream:
    """`push` and `finish` return, in order, the parts that later text cannot change any more. White space
    around reasoning and calls is dropped where no other content follows it."""

    def __init__(self, splitter: CallSplitter | None, reasoning: ReasoningSplitter | None = None) -> None:
        self._splitter = splitter
        self._reasoning = reasoning
        self._blank = ""
        """White space before content or after a call, held back: it is content only if more content
        follows."""
        self._follows_call = False
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []

    @property
    def num_unparsed(self) -> int:
        return self._splitter.num_unparsed if self._splitter else 0

    def push(self, text: str) -> AnswerParts:
        if self._reasoning is None:
            return self._push_rest(text)
        reasoning, rest = self._reasoning.push(text)
        return self._add_reasoning(reasoning) + self._push_rest(rest)

    def finish(self) -> AnswerParts:
        parts: AnswerParts = []
        if self._reasoning is not None:
            reasoning, rest = self._reasoning.finish()
            parts += self._add_reasoning(reasoning) + self._push_rest(rest)
        for part in self._splitter.finish() if self._splitter else ():
            parts += self._add_part(part)
        if self._blank and not self.calls and not self._has_reasoning:
            self.content = self._blank
            parts.append(self._blank)
        return parts

    @property
    def _has_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.found

    def _add_reasoning(self, text: str) -> AnswerParts:
        self.reasoning += text
        return [Reasoning(text)] if text else []

    def _push_rest(self, text: str) -> AnswerParts:
        if self._splitter is None:
            return self._add_part(text)
        return [added for part in self._splitter.push(text) for added in self._add_part(part)]

    def _add_part(self, part: str | ToolCall) -> AnswerParts:
        if isinstance(part, ToolCall):
            self.calls.append(part)
            self._follows_call = True
            return [part]
        if not self.content or self._follows_call:
            part = self._blank + part
            self._blank = ""
            if not part.strip():
                self._blank = part
                return []
            self._follows_call = False
            if not self.content and self._has_reasoning:
                part = part.lstrip()
        self.content += part
        return [part] if part else []


class ReasoningSplitter:
    """Splits off the text between think tags at the start of an answer. `is_open`: the prompt ends with the
    opening tag. The marks of `others`, with which calls begin, end reasoning too."""

    def __init__(self, is_open: bool, others: Sequence[str] = ()) -> None:
        self._ends = (THINK_END, *others)
        self.found = is_open
        """Whether the answer has a reasoning part, possibly an empty one."""
        self._is_over = False
        self._text = ""
        self._has_begun = False

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, rest) that later text cannot change any more."""
        if self._is_over:
            return "", text
        self._text += text
        if not self.found:
            head = self._text.lstrip()
            if head.startswith(THINK_START):
                self.found = True
                self._text = head[len(THINK_START) :]
            elif THINK_START.startswith(head):
                return "", ""
            else:
                self._is_over = True
                return "", self._pop(len(self._text))
        ends = [end for mark in self._ends if (end := self._text.find(mark)) >= 0]
        if ends:
            reasoning = self._trim(self._pop(min(ends)).rstrip())
            self._is_over = True
            return reasoning, self._pop(len(self._text)).removeprefix(THINK_END)
        # white space before the closing tag belongs to it
        num_uncertain = max(overlap(self._text, mark) for mark in self._ends)
        certain = len(self._text[: len(self._text) - num_uncertain].rstrip())
        return self._trim(self._pop(certain)), ""

    def finish(self) -> tuple[str, str]:
        rest = self._pop(len(self._text))
        return (self._trim(rest), "") if self.found and not self._is_over else ("", rest)

    def _pop(self, length: int) -> str:
        """Remove and return the first characters of the buffered text."""
        text = self._text[:length]
        self._text = self._text[length:]
        return text

    def _trim(self, text: str) -> str:
        text = text if self._has_begun else text.lstrip()
        self._has_begun = self._has_begun or bool(text)
        return text


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._buffer = ""
        """Text at whose end a stop string may begin."""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that certainly precedes any stop string."""
        text = self._buffer + text
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            self._buffer = ""
            return text[:at]
        num_uncertain = max((overlap(text, stop) for stop in self._stops), default=0)
        end = len(text) - num_uncertain
        self._buffer = text[end:]
        return text[:end]

    def flush(self) -> str:
        text = self._buffer
        self._buffer = ""
        return text
