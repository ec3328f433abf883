"""Where the command line prints, and how it refuses."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

WIDE = 500
"""Columns of what goes into a pipe or a file: there a table would be cut to 80, down to its row numbers."""

# what is printed holds names and paths of the user: `[v2]` in them is no markup, `:x:` no emoji
console = Console(
    markup=False,
    emoji=False,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE,
)
errors = Console(stderr=True, markup=False, emoji=False)


def fail(message: str) -> NoReturn:
    """End the command: bad input, said in one sentence."""
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    errors.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)
