"""Where the command line prints, and how it refuses."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)


def fail(message: str) -> NoReturn:
    """End the command: bad input, said in one sentence."""
    errors.print(f"[red]error:[/red] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)
