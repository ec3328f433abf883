"""How tasks reach Dask workers: the task runner and the lanes. A lane is a tag, or a tag on one worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import dask
from prefect.context import FlowRunContext
from prefect_dask import DaskTaskRunner
from prefect_dask.client import PrefectDaskClient

SCHEDULER_VARIABLE = "SF_SCHEDULER"
"""Address of the scheduler for flows whose configuration names none."""


class TaggedTaskRunner(DaskTaskRunner):
    """A DaskTaskRunner that learns its scheduler from the flow's `config` when the first task is submitted.

    An address in a decorator would be fixed when the module is imported, before any configuration is read.
    """

    @property
    def client(self) -> PrefectDaskClient:
        if self.address is None:
            self.address = scheduler_address()
        return super().client


def scheduler_address() -> str:
    """Raises ValueError if neither the flow's configuration nor the environment names a scheduler."""
    context = FlowRunContext.get()
    config = (context.parameters or {}).get("config") if context else None
    address = getattr(getattr(config, "cluster", None), "scheduler", None) or os.environ.get(
        SCHEDULER_VARIABLE
    )
    if not address:
        raise ValueError(
            f"no Dask scheduler: set cluster.scheduler or {SCHEDULER_VARIABLE}, or start with `sf train`"
        )
    return address


@contextmanager
def lane(tag: str, worker: str | None = None, priority: int = 0) -> Iterator[None]:
    """Everything submitted inside runs on a worker that carries `tag`, or on that worker only."""
    resources = {tag: 1} if worker is None else {tag: 1, f"@{worker}": 1}
    with dask.annotate(resources=resources, priority=priority):
        yield
