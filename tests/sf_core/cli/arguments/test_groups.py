"""Help pages: groups of commands, and words for values."""

import re

import pytest
from typer.main import get_command

from sf_core.cli.arguments.groups import GROUPS
from sf_core.cli.main import app
from tests.bench.commands import sf

NAMES = [name for names in GROUPS.values() for name in names]


def test_every_command_is_in_one_group() -> None:
    defined = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    defined += [
        c.name or c.callback.__name__
        for part in app.registered_groups
        if part.typer_instance
        for c in part.typer_instance.registered_commands
        if c.callback
    ]
    assert sorted(NAMES) == sorted(defined)
    assert [*get_command(app).commands] == NAMES  # type: ignore[attr-defined]


def test_the_groups_are_in_the_help_in_their_order() -> None:
    code, output = sf("--help")
    assert code == 0
    at = [output.index(f" {name} ") for name in GROUPS]
    assert at == sorted(at)


@pytest.mark.parametrize("command", NAMES)
def test_a_help_page_has_no_types_of_python(command: str) -> None:
    code, output = sf(command, "-h")
    assert code == 0
    assert (code, output) == sf(command, "--help")
    assert not re.search(r"<(bool|str|int|float|path|list)|list\[|Path\b", output), output


def test_a_required_argument_has_no_braces() -> None:
    _, output = sf("plan", "--help")
    assert " plan [OPTIONS] CONFIG..." in output


def test_every_option_and_argument_says_what_it_is() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.help and command.help.splitlines()[0].endswith("."), name
        for parameter in command.params:
            assert parameter.hidden or parameter.help, f"{name} {parameter.name}"
