"""Consoles of the command line, and how it reports errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

WIDE = 500
"""Width of output into a pipe or a file, where a table would otherwise be cut to 80 columns."""

# output has names and paths of the user: `[v2]` in them is no markup, `:x:` no emoji
console = Console(
    markup=False,
    emoji=False,
    highlight=False,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE,
)
errors = Console(stderr=True, markup=False, emoji=False, highlight=False)


def tell(line: str) -> None:
    """Print a line, which is never broken at the terminal's width."""
    console.print(line, soft_wrap=True)


def print_json(data: object) -> None:
    """Print data as one JSON document, for programs."""
    print(json.dumps(data, indent=2))


@contextmanager
def nothing_else_printed(applies: bool = True) -> Iterator[None]:
    """If it applies: have what others print on standard output meanwhile appear on standard error, so that a
    document of ours stays alone there."""
    if not applies or sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        # for programs that the user's code starts
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def report_bad_input() -> Iterator[None]:
    """For commands and parts of them, as a decorator too: bad input, a ValueError or an OSError, ends the
    command in one sentence."""
    try:
        yield
    except BrokenPipeError:  # whoever reads the output has ended, as `head` does
        raise
    except (ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Report bad input in one sentence and end the command."""
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    errors.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def hide_progress_bars() -> None:
    """Keep transformers from drawing bars between what is printed."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
