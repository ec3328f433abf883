"""Homes of Prefect servers. A server takes seconds to make the tables of its database: tests copy them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import prefect


def make_prefect_home(folder: Path) -> str:
    """A new PREFECT_HOME there with a database that has tables and nothing else."""
    folder.mkdir(parents=True)
    shutil.copyfile(_database(), folder / "prefect.db")
    return str(folder)


def _database() -> Path:
    """Made once for all test processes, and for each version of Prefect."""
    made = Path(tempfile.gettempdir(), f"sf-tests-{os.getuid()}-prefect-{prefect.__version__}.db")
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=made.parent) as home:
                command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
                env = os.environ | {"PREFECT_HOME": home}
                subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, timeout=120)
                os.replace(Path(home, "prefect.db"), made)
    return made
