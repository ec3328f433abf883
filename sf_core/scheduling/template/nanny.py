"""Dask preload of our nannies: they start the worker's process as a fork of a template, Python's fork server,
that has imported what the worker needs: `dask worker ... --preload-nanny sf_core.scheduling.template.nanny`.

The nanny itself imports none of it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from typing import Any

import dask
import distributed.utils

from sf_core.process.environment_variables import computes_nothing

HEAVY = {
    "rollout": ("torch",),
    "train": ("torch",),
    "agent": ("openai",),
    "cpu": ("pyarrow",),
}


def dask_setup(nanny: Any) -> None:
    """Called once, before the nanny starts its first process."""
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    multiprocessing.get_context("forkserver").set_forkserver_preload(template_modules(nanny.resources or ()))
    # else Dask replaces the list by its own, and imports pandas in the nanny to make it
    distributed.utils._forkserver_preload_set = True


def template_modules(tags: Iterable[str]) -> list[str]:
    """What the template of a worker with these tags imports, in this order."""
    return [
        *("distributed", "distributed.worker", *heavy_modules(tags)),
        *("tasks.stages", "tasks.lease", "sf_core.scheduling.preload"),
        "sf_core.scheduling.template.frozen",
    ]


def heavy_modules(tags: Iterable[str]) -> list[str]:
    """Libraries that take seconds to import and that a worker with these tags needs."""
    modules = {module for tag in tags for module in HEAVY.get(tag, ())}
    return sorted(modules - {"torch"} if computes_nothing() else modules)
