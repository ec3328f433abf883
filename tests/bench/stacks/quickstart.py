"""The quickstart, and the command `sf` as users call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from sf_core.cli.main import app
from sf_core.cli.stack.local import Services
from tests.bench import ROOT
from tests.bench.waits import patience

CONFIG = str(ROOT / "configs" / "quickstart.yaml")


def options(**settings: Any) -> list[str]:
    """Options --set section.key=value from section__key=value."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return [option for key, value in named.items() for option in ("--set", f"{key}={value}")]


def sf(
    folder: Path, *arguments: str, on: Services | None = None, quiet_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `sf` in a folder, on these services; without them, training starts its own."""
    env = os.environ | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    env.pop("PREFECT_API_URL", None)
    # the cache of running services has the key of their data plane
    env |= on.addresses if on else {"SF_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "sf_core", *arguments],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience(quiet_s),
        encoding="utf-8",
    )


def read(*arguments: str) -> str:
    """Output of a read-only command, run in this process, which has the libraries loaded."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output
