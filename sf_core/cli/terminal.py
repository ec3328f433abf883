"""Consoles of the command line, and how it reports errors."""

from __future__ import annotations

import json
import os
import sys
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
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE,
)
errors = Console(stderr=True, markup=False, emoji=False)


def print_json(data: object) -> None:
    """Print data as one JSON document, for programs."""
    print(json.dumps(data, indent=2))


def fail(message: str) -> NoReturn:
    """Report bad input in one sentence and end the command."""
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    errors.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
