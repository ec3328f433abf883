"""The groups of `sf --help`, and the words that stand for values in every help page."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from sf_core.settings import did_you_mean

GROUPS: dict[str, tuple[str, ...]] = {
    "Prepare a run": ("init", "model", "settings", "plan", "try"),
    "Train and measure": ("train", "resume", "sweep", "evaluate"),
    "Use what runs have made": ("ls", "inspect", "report", "export", "serve", "push", "replay", "gc"),
    "Host a stack or a cluster": (
        *("up", "down", "setup-server"),
        *("server", "scheduler", "dataplane", "worker", "key"),
    ),
}
"""Names of all commands, in the order of the help."""

_WORDS = {
    **dict.fromkeys(("output", "out", "prompts", "port_file"), "FILE"),
    **dict.fromkeys(("journal_dir", "record", "folder", "root"), "FOLDER"),
    **dict.fromkeys(("host", "scheduler"), "ADDRESS"),
    **dict.fromkeys(("run", "runs", "where"), "RUN"),
    **dict.fromkeys(("show", "resume"), "NAME"),
    **{"endpoint": "URL", "to": "FORMAT", "overrides": "KEY=VALUE", "device_kind": "KIND"},
}
"""Words for the values of some parameters; those of others are the names themselves."""

_NUMBERS = (int, float, int | None, float | None)


class Command(TyperCommand):
    """A command whose help has no types of Python."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # braces around a required argument look like a choice
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def get_params(self, ctx: Any) -> list[Any]:
        return _name_values(super().get_params(ctx))


class App(typer.Typer):
    """Commands of this kind."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": Command} | options)


class Commands(TyperGroup):
    """The commands of `sf`, grouped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: self.commands[name] for names in GROUPS.values() for name in names}
        for group, names in GROUPS.items():
            for name in names:
                command: Any = self.commands[name]
                command.rich_help_panel = group

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # of typer's own suggestions, each version has others, and early versions have none
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            hint = did_you_mean(name, self.commands) or "; `sf --help` lists the commands"
            ctx.fail(f"there is no command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands]

    def get_params(self, ctx: Any) -> list[Any]:
        return _name_values(super().get_params(ctx))


def _name_values(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.metavar = parameter.metavar or _name(parameter)
            # its name stands for its value
            parameter.display_type = lambda ctx: ""  # type: ignore[method-assign]
        elif isinstance(parameter, TyperOption) and parameter.metavar is None:
            kind = parameter.type_descriptor
            word = "|".join(map(str, kind.choices)) if kind.choices else _name(parameter)
            parameter.metavar = "" if parameter.is_flag else "N" if kind.annotation in _NUMBERS else word
    return parameters


def _name(parameter: TyperArgument | TyperOption) -> str:
    name = parameter.name or ""
    return _WORDS.get(name, name.upper())
