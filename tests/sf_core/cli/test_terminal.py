"""Everything that a command prints is printable, and its own colours stay."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sf_core.cli import terminal
from sf_core.cli.live import LineProgress, RunProgress
from sf_core.cli.serving.conversation import Printer
from sf_core.cli.terminal import PrintableConsole, say_error
from tests.sf_core.cli.status import STATUS

HOSTILE = "\x1b]0;owned\x07 \x1b]52;c;b3duZWQ=\x07 \x1b[2J \x9b1A [/red]"
SHOWN = r"\x1b]0;owned"


def in_a_terminal(**options: Any) -> PrintableConsole:
    return PrintableConsole(
        file=StringIO(), force_terminal=True, width=200, markup=False, emoji=False, highlight=False, **options
    )


def printed(console: PrintableConsole) -> str:
    """What was printed, without the colours and the cursor movements that rich itself makes."""
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[\d;?]*[mKAlh]|\r", "", console.file.getvalue())


def _in_a_table() -> Table:
    table = Table("task")
    table.add_row(HOSTILE)
    return table


@pytest.mark.parametrize("shown", [HOSTILE, Text(HOSTILE), Text.assemble((HOSTILE, "red")), _in_a_table()])
def test_nothing_that_is_printed_steers_the_terminal(shown: RenderableType) -> None:
    console = in_a_terminal()
    console.print(shown)
    text = printed(console)
    assert SHOWN in text and "\x1b" not in text and "\x07" not in text and "\x9b" not in text


def test_the_colours_of_a_command_stay() -> None:
    console = in_a_terminal(color_system="standard")
    console.print(Text("failed", style="red"))
    assert isinstance(console.file, StringIO) and console.file.getvalue() == "\x1b[31mfailed\x1b[0m\n"


def test_the_live_lines_of_a_run_do_not_steer_the_terminal() -> None:
    console = in_a_terminal()
    hostile: dict[str, Any] = {
        "stage": HOSTILE,
        "counters": {"failed_sessions": 3, "failures.agent_error": 3},
        "last_error": f"my_agent.py:12: agent raised ValueError: {HOSTILE}",
        "straggler": {"session": HOSTILE, "group": 3, "age_s": 95.0},
        "wait": {"what": HOSTILE, "since": 0.0, "until": 1800.0},
        "engines": [{"worker": HOSTILE, "version": 2}],
    }
    progress = RunProgress(console, 10)
    with Live(progress, console=console, auto_refresh=False):
        progress.update({**STATUS, **hostile}, {})  # type: ignore[typeddict-item]
        progress.show_status(HOSTILE)
    text = printed(console)
    assert text.count(SHOWN) >= 5 and "\x1b" not in text and "\x07" not in text


def test_lines_of_a_log_and_of_a_conversation_do_not_steer_the_terminal() -> None:
    console = in_a_terminal()
    LineProgress(console).show_status(HOSTILE)
    Printer(console).print_part(HOSTILE, HOSTILE)
    text = printed(console)
    assert text.count(SHOWN) == 3 and "\x1b" not in text and "\x07" not in text


def test_an_error_shows_what_would_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = in_a_terminal()
    monkeypatch.setattr(terminal, "errors", console)
    say_error(f"task {HOSTILE}: no answer")
    assert printed(console) == (
        r"error: task \x1b]0;owned\x07 \x1b]52;c;b3duZWQ=\x07 \x1b[2J \x9b1A [/red]: no answer" + "\n"
    )
