"""Consoles of the command line, and how it reports errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from sf_core.printable import printable

WIDE = 500
"""Width of output into a pipe or a file, where a table would otherwise be cut to 80 columns."""


class PrintableConsole(Console):
    """Prints text of others, which cannot steer the terminal. Its own styles and cursor movements are no
    text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        # before Text removes some of the characters silently
        return super().render_str(printable(text), **options)


def _make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    # output has names and paths of the user: `[v2]` in them is no markup, `:x:` no emoji
    return PrintableConsole(stderr=stderr, markup=False, emoji=False, highlight=False, width=width)


UNREAD = 141
"""Exit code of a command whose output nobody reads any more, as of a program that SIGPIPE ends (128 + 13).
The signal itself would also end a command when a server closes a connection."""

# None: the caller has closed it
_is_terminal = sys.stdout is not None and sys.stdout.isatty()
console = _make_console(width=None if _is_terminal or "COLUMNS" in os.environ else WIDE)
errors = _make_console(stderr=True)


def tell(line: str) -> None:
    """Print a line, which is never broken at the terminal's width."""
    console.print(line, soft_wrap=True)


def print_json(data: object) -> None:
    """Print data as one JSON document, for programs."""
    print(json.dumps(data, indent=2))


@contextmanager
def report_bad_input() -> Iterator[None]:
    """For commands and parts of them, as a decorator too: bad input, a ValueError or an OSError, ends the
    command in one sentence."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        raise SystemExit(UNREAD) from None
    except (ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Report bad input in one sentence and end the command."""
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    errors.print(Text.assemble(("error:", "red"), f" {printable(message)}"), soft_wrap=True)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def hide_progress_bars() -> None:
    """Keep transformers from drawing bars between what is printed."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
