"""The last figures of each benchmark, kept in benchmarks/results/NAME.json with commit, date and machine.

    python -m benchmarks.results capture storage     runs these and keeps the JSON line that each printed
    python -m benchmarks.results                     runs all: hours, on a machine with nothing else

Only a committed tree is measured, so that the commit identifies the code. `python -m benchmarks.table` makes
docs/benchmarks.md and README's figures from the files.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

COMMANDS = {
    "orchestration": "benchmarks.orchestration",
    "quickstart": "benchmarks.quickstart",
    "engines": "benchmarks.engines --size 1m --size 10m",
    # a quarter of the samples, once: minutes for each side
    "engines_100m": "benchmarks.engines --size 100m --prompts 8 --repeats 1",
    "resumed": "benchmarks.resumed",
    "schemas": "benchmarks.schemas",
    "quickstart_vs_trl": "benchmarks.quickstart_vs_trl",
    "real_model": "benchmarks.real_model",
    "trainer": "benchmarks.trainer",
    "long_rows": "benchmarks.trainer --prompts 128,2048,8192 --sampled 512 --warm-steps 1",
    "recipes": "benchmarks.recipes",
    # after `sf train quickstart --set run_id=teacher`
    "teachers": "benchmarks.teachers runs/teacher@40",
    # three hours; goes on with the runs of the file
    "curricula": "benchmarks.curricula --lines benchmarks/results/curricula.jsonl",
    "group_sessions": "benchmarks.group_sessions",
    "images": "benchmarks.images",
    "capture": "benchmarks.capture",
    "storage": "benchmarks.storage",
    "gateway": "benchmarks.gateway --only throughput --only long",
    "gateway_turns": "benchmarks.gateway --only turns",
    "streaming": "benchmarks.gateway --only streaming",
    "agent_clients": "benchmarks.agent_clients --only sessions",
    "agent_runs": "benchmarks.agent_clients --only runs",
    "weight_path": "benchmarks.weight_path",
    "weights": "benchmarks.weights",
    "harness": "benchmarks.harness",
    # emulated, the five take an hour and a half
    "pipelines": "benchmarks.pipelines --simulate --iterations 8",
    "pipelines_deltas": "benchmarks.pipelines --simulate --iterations 8 "
    "--set emulation.stored_bytes_per_parameter=0.03 --set emulation.verify_bandwidth=1e12",
}
"""Arguments of `python -m`, by the name of the benchmark."""

MADE_FROM_RESULTS = ("README.md", "docs/benchmarks.md", "benchmarks/results/")
"""Paths that may differ from the commit, because earlier benchmarks write them."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help="of benchmarks; all by default")] = None,
) -> None:
    unknown = set(names or ()) - set(COMMANDS)
    if unknown:
        raise typer.BadParameter(f"no such benchmark: {sorted(unknown)}; there are {list(COMMANDS)}")
    for name in names or COMMANDS:
        keep(name)


def keep(name: str, folder: Path = RESULTS) -> None:
    """Run a benchmark and store its line. Raises SystemExit if it fails or prints none."""
    commit = commit_of(ROOT)
    started = datetime.now(UTC)
    load = os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(COMMANDS[name])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(
            f"{name}: python -m {COMMANDS[name]} failed with {done.returncode}; nothing was kept"
        )
    stored = {
        "command": f"python -m {COMMANDS[name]}",
        "commit": commit,
        "date": started.isoformat(timespec="seconds"),
        "machine": machine() | {"load_before": round(load, 2)},
        "line": last_line(name, done.stdout),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def commit_of(root: Path) -> str:
    """Hash of the checked-out commit. Raises SystemExit if tracked files differ from it."""
    changed = [line[3:] for line in _git(root, "status", "--porcelain", "--untracked-files=no").splitlines()]
    if differing := [path for path in changed if not path.startswith(MADE_FROM_RESULTS)]:
        raise SystemExit(f"commit first, then measure: {', '.join(differing)} differ from the commit")
    return _git(root, "rev-parse", "HEAD").strip()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"git {arguments[0]} in {root} failed: {done.stderr.strip()}")
    return done.stdout


def last_line(name: str, output: str) -> dict[str, Any]:
    """The figures that a benchmark printed. Raises SystemExit if there are none."""
    lines = output.strip().splitlines()
    try:
        line = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        line = None
    if not isinstance(line, dict):
        raise SystemExit(f"{name}: python -m {COMMANDS[name]} printed no JSON line; nothing was kept")
    return line


if __name__ == "__main__":
    typer.run(main)
