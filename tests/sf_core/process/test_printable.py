"""No text of others steers a terminal."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterator
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.process.user_code import clean_logs, printable

TITLE = "\x1b]0;owned\x07"
CLIPBOARD = "\x1b]52;c;b3duZWQ=\x07"
CLEAR = "\x1b[2J"


def test_sequences_that_set_title_clipboard_and_screen_are_shown() -> None:
    shown = printable(f"{TITLE}|{CLIPBOARD}|{CLEAR}|\x9b2J|\rover")
    assert shown == r"\x1b]0;owned\x07|\x1b]52;c;b3duZWQ=\x07|\x1b[2J|\x9b2J|\rover"


def test_a_mark_that_turns_the_line_and_half_a_character_are_shown() -> None:
    assert printable("a\u202eb \udc80") == r"a\u202eb \udc80"


@pytest.mark.parametrize("text", ["a\nb\tc", "été 日本\u3000語", "👩\u200d💻", "no\u00a0break", "C:\\x1b"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_the_end_of_a_line_of_windows_is_a_newline() -> None:
    assert printable("a\r\nb") == "a\nb"


@given(st.text(st.characters()))
def test_what_is_printable_holds_nothing_that_steers_and_can_be_written(text: str) -> None:
    shown = printable(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cs") for c in shown if c not in "\n\t")
    assert printable(shown) == shown
    shown.encode()


@pytest.fixture
def clean_records() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    clean_logs()
    yield
    logging.setLogRecordFactory(before)


def test_log_lines_and_tracebacks_in_them_are_printable(clean_records: None) -> None:
    written = StringIO()
    log = logging.Logger("quotes")
    handler = logging.StreamHandler(written)
    log.addHandler(handler)
    try:
        raise ValueError(CLEAR)
    except ValueError as error:
        log.exception("session %s failed: %s", TITLE, error)
    lines = written.getvalue().splitlines()
    assert lines[0] == r"session \x1b]0;owned\x07 failed: \x1b[2J"
    assert lines[-1] == r"ValueError: \x1b[2J"
    assert "\x1b" not in written.getvalue()
