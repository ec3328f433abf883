"""The page of the commands of `sf`, made from their own help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from sf_core.cli.main import app

_TOP = """# Commands

This page lists every command of `sf`, with its arguments and options. In a terminal, `sf --help` and
`sf COMMAND --help` print the same text.
"""
_OTHER = "Commands"
"""Title of the commands that name no group."""


def commands_page() -> str:
    """Markdown of the page."""
    group: Any = typer.main.get_command(app)
    grouped: dict[str, list[Any]] = {}
    for command in group.commands.values():
        if not command.hidden:
            panel = command.rich_help_panel
            grouped.setdefault(panel if isinstance(panel, str) else _OTHER, []).append(command)
    lines = [_TOP]
    for title, commands in grouped.items():
        lines.append(f"\n## {title}\n")
        for command in commands:
            lines += _show(command)
    lines.append("\n## Options of sf itself\n")
    lines += _parameters(group, group.make_context("sf", [], resilient_parsing=True))
    return "\n".join(lines) + "\n"


def _show(command: Any) -> Iterator[str]:
    context = command.make_context(f"sf {command.name}", [], resilient_parsing=True)
    usage = " ".join(context.get_usage().removeprefix("Usage:").split())
    yield f"\n### `sf {command.name}` {{#{command.name}}}\n"
    for part in (command.help or "").split("\n\n"):
        # what is indented is code, in Markdown too
        yield (part if part.startswith("    ") else escape(" ".join(part.split()))) + "\n"
    yield f"```\n{usage}\n```\n"
    yield from _parameters(command, context)


def _parameters(command: Any, context: Any) -> Iterator[str]:
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or parameter.hidden or parameter.name == "help":
            continue
        name, text = record
        # the default and the range come last, in brackets
        if bracket := re.search(r"\s*\[([^\[\]]+)\]$", text):
            text = text[: bracket.start()]
        extra = f" *({escape(bracket[1])})*" if bracket else ""
        yield f"- `{name}`{extra}{text and ': '}{escape(' '.join(text.split()))}"
    yield ""


def escape(text: str) -> str:
    """Markdown that shows the text unchanged. Parts in backticks stay code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\[\]{}*\\])", r"\\\1", part).replace("<", "&lt;")
        for part in parts
    )
