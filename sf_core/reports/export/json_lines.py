"""Formats with one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sf_core.reports.export.conversations import Conversation, Rendered, Row, as_stored
from storage import files


class JsonLines:
    ending = ".jsonl"

    def __init__(self, parts: Sequence[str]) -> None:
        """`parts` is ignored: JSON needs no schema before writing."""

    def rendered(self, conversation: Conversation) -> Rendered:
        return as_stored(conversation)

    def write(self, uri: str, parts: Iterable[list[Row]]) -> None:
        with files.writer(uri) as file:
            for rows in parts:
                file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
