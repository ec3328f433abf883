"""Removal of texts that clients change with each request and no model needs: they would begin another branch
at every turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from sf_core.config.unsupported_fields import Normalisation
from sf_core.dataplane.gateway.dialects.checks import Body

BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of a line at the start of Claude Code's system prompt, with a hash of the conversation so far.
Gateways to other APIs pass it on."""

_LINE_END = re.compile("\r\n|[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")
"""Line ends as in str.splitlines. A text of megabytes is not split into its lines."""


def normalise(body: Body, names: Collection[Normalisation]) -> Body:
    """The body without the texts that these normalisations remove."""
    for name in names:
        body = _NORMALISATIONS[name](body)
    return body


def _without_billing_header(body: Body) -> Body:
    prompts = {name: _remove_header(body[name]) for name in ("system", "instructions") if name in body}
    histories = {
        name: [_remove_header_from_message(message) for message in body[name]]
        for name in ("messages", "input")
        if isinstance(body.get(name), list)
    }
    return body | prompts | histories


def _remove_header_from_message(message: Any) -> Any:
    if isinstance(message, dict) and message.get("role") == "system":
        return message | {"content": _remove_header(message.get("content"))}
    return message


def _remove_header(content: Any) -> Any:
    if isinstance(content, str):
        return _without_header_lines(content)
    if isinstance(content, list):
        parts = [
            part | {"text": _without_header_lines(part["text"])} if _is_text(part) else part
            for part in content
        ]
        return [part for part in parts if not _is_text(part) or part["text"]]
    return content


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _without_header_lines(text: str) -> str:
    """The text without the lines of the header."""
    pieces = list[str]()
    end = 0
    at = text.find(BILLING_HEADER)
    while at >= 0:
        if at == 0 or _LINE_END.fullmatch(text, at - 1, at):
            pieces.append(text[end:at])
            line_end = _LINE_END.search(text, at)
            end = len(text) if line_end is None else line_end.end()
        at = text.find(BILLING_HEADER, max(end, at + 1))
    return "".join([*pieces, text[end:]]) if end else text


_NORMALISATIONS: dict[Normalisation, Callable[[Body], Body]] = {"billing_header": _without_billing_header}
