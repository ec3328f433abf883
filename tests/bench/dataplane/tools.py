"""Tools, and formats of their calls."""

from __future__ import annotations

import json
from pathlib import Path

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "<|x|>",
]


def make_special(file: Path) -> None:
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    added = [token for token in tokenizer["added_tokens"] if token["content"] not in MARKS]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    number = max(ids.values())
    for mark in MARKS:
        number += mark not in ids
        added.append(added[0] | {"content": mark, "id": ids.get(mark, number), "special": True})
    file.write_text(json.dumps(tokenizer | {"added_tokens": added}), encoding="utf-8")
