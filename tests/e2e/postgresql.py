"""A PostgreSQL server from Debian's packages."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sf_core.cli.stack.local import free_port
from tests.bench.waits import patience

INSTALLED = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


@contextmanager
def postgresql() -> Iterator[str]:
    """URL of an empty database. Skips if the server is not installed, except in CI."""
    if not INSTALLED and os.environ.get("CI") != "true":
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    tools = INSTALLED[-1].parent
    # not below pytest's folders, which other users may not enter
    folder = Path(tempfile.mkdtemp(prefix="sf-postgresql-"))
    user = None
    if os.geteuid() == 0:  # it refuses to run as root
        user = "postgres"
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    port = free_port()

    def call(tool: str, *arguments: str) -> None:
        command = [str(tools / tool), "-D", str(folder / "data"), *arguments]
        subprocess.run(
            command, user=user, check=True, stdout=subprocess.DEVNULL, timeout=patience(), cwd=folder
        )

    try:
        call("initdb", "--username", "sf", "--auth", "trust", "--no-sync")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        call("pg_ctl", "start", "--wait", "--log", str(folder / "log"), "--options", options)
        yield f"postgresql+asyncpg://sf@127.0.0.1:{port}/postgres"
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            call("pg_ctl", "stop", "--wait", "--mode", "immediate")
        shutil.rmtree(folder)
