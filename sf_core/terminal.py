"""Where the command line prints, and how it refuses."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)


def fail(message: str) -> NoReturn:
    """End the command: bad input, said in one sentence."""
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    # what looks like markup in it is the user's
    errors.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
