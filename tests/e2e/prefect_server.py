"""A Prefect server for deployments with a database of its own, and a fresh clone to deploy from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from sf_core.local_stack import LocalStack, local_stack, start_prefect_server
from tests.e2e.quickstart import ROOT


@dataclass
class Server:
    api: str
    clone: Path
    stack: LocalStack

    @property
    def env(self) -> dict[str, str]:
        return {**self.stack.env, "PREFECT_API_URL": self.api}

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a module in the clone, against this server."""
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.clone,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def deploy(self) -> None:
        for command in (["sf_core", "setup-server"], ["prefect", "--no-prompt", "deploy", "--all"]):
            done = self.call(*command)
            assert done.returncode == 0, done.stdout + done.stderr

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        with temporary_settings({PREFECT_API_URL: self.api}), get_client(sync_client=True) as client:
            yield client


@contextmanager
def prefect_server(folder: Path, env: dict[str, str]) -> Iterator[Server]:
    clone = folder / "clone"
    _copy_tracked(clone)
    paths = os.pathsep.join(filter(None, [str(clone), env.get("PYTHONPATH")]))
    settings = {**env, "PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": paths, "SF_HOME": str(clone)}
    with local_stack(folder / "logs", settings) as stack:
        yield Server(start_prefect_server(stack, for_deployments=True)(), clone, stack)


def _copy_tracked(folder: Path) -> None:
    """What a clone of this working tree would have."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
