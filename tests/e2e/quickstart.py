"""The quickstart in seconds, with a small policy and few sessions, and the command `sf` as users call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sf_core.local_stack import Services

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
SMALL = {
    "policy.hidden_size": 32,
    "policy.num_layers": 1,
    "policy.warmstart.steps": 5,
    "rollout.group_size": 2,
    "rollout.groups_per_batch": 4,
    "train.iterations": 2,
    "evaluate.num_tasks": 4,
}


def options(**more: Any) -> list[str]:
    """--set of SMALL and of section__key=value."""
    settings = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    return [option for key, value in settings.items() for option in ("--set", f"{key}={value}")]


def sf(folder: Path, *arguments: str, on: Services | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, on these services. Without them, what trains starts its own."""
    env = os.environ | {
        "PREFECT_HOME": str(folder / "prefect"),
        "SF_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    env.pop("PREFECT_API_URL", None)
    env |= on.addresses if on else {}
    return subprocess.run(
        [sys.executable, "-m", "sf_core", *arguments],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
