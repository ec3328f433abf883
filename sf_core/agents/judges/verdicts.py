"""Which replies of a judge are verdicts: those that ended by themselves, with an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sf_core.dataplane.chat.answer_parser import THINK_END, THINK_START

WHY_NONE = {
    "length": "the reply was cut off: raise environment.judges.{name}.max_tokens, or the server's own limit",
    "content_filter": "a content filter of the server cut off the reply",
    "refusal": "the judge refused to answer",
    "tool_calls": "the reply calls a tool",
    "reasoning": "the reply has reasoning and no answer",
    "empty": "the reply is empty",
    "other": "the server does not say that the reply ended by itself (`finish_reason` is not `stop`)",
}
"""Why replies are no verdicts: the reasons as they are counted, each with a sentence for errors."""


class Said(NamedTuple):
    text: str
    """The answer of a reply, without reasoning."""
    fault: str
    """The key of WHY_NONE if the reply is no verdict; else empty."""


def read_reply(choice: Mapping[str, Any], first_token: str | None = None) -> Said:
    """Read a choice of a chat completion. `first_token` is given if only the first token of the reply was
    asked for: such a reply may end with `length`. Raises LookupError, TypeError or AttributeError if this is
    no choice."""
    message = choice["message"]
    end = choice.get("finish_reason")
    content = _join(message.get("content"))
    _, mark, answer = content.partition(THINK_END)
    text = answer.lstrip() if mark else content
    is_thinking = not mark and (content or first_token or "").lstrip().startswith(THINK_START)
    if end == "content_filter":
        return Said(text, "content_filter")
    if message.get("refusal"):
        return Said(text, "refusal")
    if end in ("tool_calls", "function_call") or message.get("tool_calls") or message.get("function_call"):
        return Said(text, "tool_calls")
    if end == "length" and first_token is None:
        return Said(text, "length")
    if end not in ("stop", "length"):
        return Said(text, "other")
    reasons = is_thinking or mark or message.get("reasoning_content") or message.get("reasoning")
    # the one token that was asked for may be white space, and the log-probs beside it are an answer
    is_space = end == "length" and bool(text and first_token and not first_token.strip() and not reasons)
    if is_thinking or not (text.strip() or is_space):
        return Said(text, "reasoning" if reasons else "empty")
    return Said(text, "")


def _join(content: Any) -> str:
    """The text of a message's content; some servers write a list of parts."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part["text"]) for part in content if part.get("type") == "text")
