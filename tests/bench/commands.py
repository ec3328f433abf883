"""Commands, by default `sf`, run in this process."""

from __future__ import annotations

import re
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from sf_core.cli.main import app
from tests.bench.refusals import check_sentence, snapshot


def sf(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def check_refused(folder: Path, arguments: list[str], *names: str, command: Typer = app) -> str:
    """Check that the command ends with an error, one clear sentence, and writes nothing into the folder."""
    before = snapshot(folder)
    result = CliRunner().invoke(command, arguments)
    raised = result.exception if not isinstance(result.exception, SystemExit) else None
    assert raised is None, f"{type(raised).__name__}: {raised}"
    assert result.exit_code == 2, (result.exit_code, result.output)
    sentence = _sentence(result.output)
    check_sentence(sentence, *names)
    assert snapshot(folder) == before
    return sentence


def _sentence(output: str) -> str:
    if output.startswith("error: "):
        return output.removeprefix("error: ")
    # arguments that do not parse are refused by typer: in a box, below how the command is used
    _, _, box = output.partition("─ Error ─")
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", box).split())


def without_time(plan: str) -> str:
    """What `sf plan` prints, without the time, which is measured anew each time."""
    return re.sub(r"time\s+(about|less than)\s.*?per\s+session", "", plan, flags=re.DOTALL)
