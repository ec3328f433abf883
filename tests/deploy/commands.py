"""Whether a command that a deployment file names is one of ours, with options that it has."""

from __future__ import annotations

import re
from collections.abc import Mapping

import dask
import typer

from sf_core.cli.main import app
from sf_core.cli.stack import processes
from tests.e2e.conftest import ROOT

DEPLOY = ROOT / "deploy"
COMMANDS = typer.main.get_group(app).commands
# that they work, tests/e2e/test_standing_stack.py and test_deployments.py show
PREFECT = [processes.prefect_worker("sf").command[2:], ["prefect", "--no-prompt", "deploy", "--all"]]


def filled_in(word: str, env: Mapping[str, str]) -> str:
    """A word with its ${NAME} or $(NAME). Raises KeyError for a variable that is not set."""
    return re.sub(r"\$[({](\w+)[)}]", lambda found: env[found[1]], word)


def check_command(command: list[str], env: Mapping[str, str]) -> None:
    """Raises KeyError for a command and UsageError for an option that `sf` does not have."""
    program, name, *options = [filled_in(word, env) for word in command]
    if program == "prefect":
        assert [program, name, *options] in PREFECT
        return
    assert program == "sf"
    COMMANDS[name].make_context(name, options).close()


def check_variables(env: Mapping[str, str], used: str) -> None:
    """Every variable is read: by Prefect, by Dask, by our settings or by the text of what uses the file. What
    `sf up` sets for Prefect is set."""
    assert processes.PREFECT_SETTINGS.items() <= env.items()
    readers = used + (ROOT / "sf_core" / "settings.py").read_text() + (ROOT / "prefect.yaml").read_text()
    for name in env:
        if name.startswith("DASK_"):
            dask.config.get(name.removeprefix("DASK_").lower().replace("__", "."))
        elif name.startswith("SF_"):
            assert name in readers, name
        else:
            assert name.startswith("PREFECT_") or name == "HOME", name
