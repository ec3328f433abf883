"""deploy/systemd: units that systemd accepts and that call commands we have."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.waits import patience
from tests.deploy import commands

UNITS = sorted((commands.DEPLOY / "systemd").glob("*.service"))
WORKERS = sorted((commands.DEPLOY / "systemd").glob("worker-*.env"))
INSTALLED = "/opt/seamlessflow/.venv/bin"


def environment(*names: str) -> dict[str, str]:
    lines = [
        line
        for name in names
        for line in (commands.DEPLOY / "systemd" / name).read_text(encoding="utf-8").splitlines()
    ]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("unit", "worker"),
    [(unit, worker) for unit in UNITS for worker in (WORKERS if "@" in unit.name else [None])],
    ids=lambda file: getattr(file, "name", ""),
)
def test_a_unit_calls_commands_and_options_that_exist(unit: Path, worker: Path | None) -> None:
    env = environment("cluster.env", *([worker.name] if worker else []))
    starts = [
        line.partition("=")[2].replace("%i", "r0")
        for line in unit.read_text(encoding="utf-8").splitlines()
        if line.startswith("ExecStart")
    ]
    assert starts
    for start in starts:
        # systemd makes words of a variable without braces
        words = re.sub(r"\$(\w+)", lambda found: env[found[1]], start.removeprefix(f"{INSTALLED}/"))
        commands.check_command(shlex.split(words), env)


def test_the_examples_set_nothing_that_nobody_reads() -> None:
    used = "".join(unit.read_text(encoding="utf-8") for unit in UNITS)
    commands.check_variables(environment("cluster.env", "worker-r0.env"), used)


def test_systemd_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None and os.environ.get("CI") != "true":
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace(INSTALLED, str(Path(sys.executable).parent))
        (tmp_path / unit.name.replace("@", "@r0")).write_text(text, encoding="utf-8")
    said = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        timeout=patience(),
        encoding="utf-8",
    )
    assert (said.returncode, said.stderr) == (0, "")
