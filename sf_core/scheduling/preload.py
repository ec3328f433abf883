"""Loaded by every Dask worker at start: refuses foreign code, imports what tags need."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import sf_core
from sf_core.settings import computes_nothing

HEAVY = {
    "rollout": ("torch",),
    "train": ("torch",),
    "agent": ("openai", "reasoning_gym"),
    "cpu": ("pyarrow",),
}


async def dask_setup(worker: Any) -> None:
    """Raises RuntimeError if another `tasks` or `storage` package shadows ours: the names are common ones."""
    root = Path(sf_core.__file__).parent.parent
    for name in ("tasks", "storage"):
        package = importlib.import_module(name)
        if Path(package.__file__ or "").parent.parent != root:
            raise RuntimeError(f"package {name} comes from {package.__file__}, not from {root}")
    for tag in worker.state.total_resources:
        for module in HEAVY.get(tag, ()):
            if module == "torch" and computes_nothing():
                continue
            importlib.import_module(module)
