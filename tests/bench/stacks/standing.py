"""A standing stack (`sf up`) for one test."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from sf_core.cli.stack.local import Ports, Services
from sf_core.cli.stack.supervisor import call
from sf_core.process.child_processes import MARK
from tests.bench import ROOT
from tests.bench.dataplane.planes import operator_headers
from tests.bench.namesakes import make_namesakes
from tests.bench.stacks.prefect_home import make_prefect_home
from tests.bench.stacks.prefect_server import LOOKS_OFTEN
from tests.bench.waits import patience


@dataclass
class Stack:
    folder: Path
    ports: Ports = field(default_factory=Ports.free)
    env: dict[str, str] = field(default_factory=dict)
    """Environment of all its processes, added to what they inherit."""

    def __post_init__(self) -> None:
        self.home = make_prefect_home(self.folder / "prefect")
        # their names are common: a user may have such folders
        make_namesakes(self.user_code, "tasks", "flows", "storage")

    @property
    def user_code(self) -> Path:
        """The folder outside the repository in which a user calls `sf`."""
        return self.folder / "user"

    @property
    def services(self) -> Services:
        return self.ports.services

    def environment(self) -> dict[str, str]:
        places = {"PREFECT_HOME": self.home, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return os.environ | places | LOOKS_OFTEN | self.env

    def sf(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sf_core", command, "--folder", str(self.folder), *options],
            env=self.environment(),
            cwd=self.user_code,
            capture_output=True,
            text=True,
            timeout=patience(280),
            encoding="utf-8",
        )

    def up(self, *options: str) -> subprocess.CompletedProcess[str]:
        ports = {
            "prefect": self.ports.prefect,
            "scheduler": self.ports.scheduler,
            "dataplane": self.ports.dataplane,
        }
        return self.sf(
            "up", *options, *(text for name, port in ports.items() for text in (f"--{name}-port", str(port)))
        )

    def pid(self, part: str) -> int:
        """Process id of a part; 0 while it is not running."""
        return int(call(self.folder, "getProcessInfo", part)["pid"])

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def dataplane_answers(self) -> bool:
        try:
            headers = operator_headers(self.services.dataplane)
            return httpx.get(f"{self.services.dataplane}/metrics", headers=headers, timeout=2).is_success
        except httpx.HTTPError:
            return False
