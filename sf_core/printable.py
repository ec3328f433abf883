"""Text of others on the terminal: task ids, errors and file names may quote a model, and a model samples
anything, also what would set the clipboard, the title or the colours of a terminal."""

from __future__ import annotations

import logging
import re
import traceback
from typing import Any

# all control characters except the newline and the tab, marks that turn the direction of a line, and halves
# of characters, which no encoding can write
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def show(character: str) -> str:
    """The character as Python writes it: `\\x1b`."""
    return character.encode("unicode_escape").decode()


def printable(text: str) -> str:
    """The text with each character that steers a terminal shown; newlines and tabs stay."""
    return _STEERING.sub(lambda found: show(found[0]), text.replace("\r\n", "\n"))


def clean_logs() -> None:
    """Have every log record of this process, of whichever logger and handler, hold printable text."""
    logging.setLogRecordFactory(_CleanRecord)


class _CleanRecord(logging.LogRecord):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.exc_info and self.exc_info[0] is not None:
            # formatters use it instead of formatting the traceback themselves
            self.exc_text = printable("".join(traceback.format_exception(*self.exc_info))).rstrip("\n")

    def getMessage(self) -> str:
        return printable(super().getMessage())
