"""Checks that the commands in deployment files exist, with their options."""

from __future__ import annotations

import re
from collections.abc import Mapping

import dask
import typer

from sf_core.cli.main import app
from sf_core.cli.stack import processes
from tests.bench import ROOT

DEPLOY = ROOT / "deploy"
COMMANDS = typer.main.get_group(app).commands
# that they work, tests/e2e/test_standing_stack.py and test_deployments.py show
PREFECT = [processes.prefect_worker("sf").command[3:], ["prefect", "--no-prompt", "deploy", "--all"]]


def filled_in(word: str, env: Mapping[str, str]) -> str:
    """A word with ${NAME} and $(NAME) replaced. Raises KeyError for a variable that is not set."""
    return re.sub(r"\$[({](\w+)[)}]", lambda found: env[found[1]], word)


def check_command(command: list[str], env: Mapping[str, str]) -> None:
    """Raises KeyError for an unknown command, UsageError for an unknown option of `sf`."""
    program, name, *options = [filled_in(word, env) for word in command]
    if program == "prefect":
        assert [program, name, *options] in PREFECT
        return
    assert program == "sf"
    COMMANDS[name].make_context(name, options).close()


def check_variables(env: Mapping[str, str], used: str) -> None:
    """Check that every variable is read by Prefect, Dask, our settings or the text in `used`, and that those
    that `sf up` sets for Prefect are set."""
    assert processes.PREFECT_SETTINGS.items() <= env.items()
    readers = (
        used
        + (ROOT / "sf_core" / "process" / "environment_variables.py").read_text(encoding="utf-8")
        + (ROOT / "prefect.yaml").read_text(encoding="utf-8")
    )
    for name in env:
        if name.startswith("DASK_"):
            dask.config.get(name.removeprefix("DASK_").lower().replace("__", "."))
        elif name.startswith("SF_"):
            assert name in readers, name
        else:
            assert name.startswith("PREFECT_") or name == "HOME", name
