"""Where the command line prints, and how it refuses."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

# what is printed holds names and paths of the user: `[v2]` in them is no markup, `:x:` no emoji
console = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False)


def fail(message: str) -> NoReturn:
    """End the command: bad input, said in one sentence."""
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    errors.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)
