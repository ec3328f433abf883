"""Homes of Prefect servers. Making a database's tables takes seconds, so tests copy one."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import prefect

from tests.bench.waits import patience


def make_prefect_home(folder: Path) -> str:
    """Make a PREFECT_HOME in the folder, with a database of empty tables."""
    folder.mkdir(parents=True)
    shutil.copyfile(_database(), folder / "prefect.db")
    return str(folder)


def _database() -> Path:
    """Database file, made once for all test processes and each version of Prefect."""
    made = Path(tempfile.gettempdir(), f"sf-tests-{os.getuid()}-prefect-{prefect.__version__}.db")
    with open(made.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=made.parent) as home:
                command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
                env = os.environ | {"PREFECT_HOME": home}
                subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, timeout=patience())
                os.replace(Path(home, "prefect.db"), made)
    return made
