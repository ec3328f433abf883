"""Whose tasks the workers run: every task is annotated with its owner, an attempt at a run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from distributed import Client

if TYPE_CHECKING:
    from sf_core.stages.run import RunRef

ANSWER_S = 2.0
"""How long a worker may take to say what it runs."""


def owner_of(run: RunRef) -> str:
    """What the tasks of an attempt are annotated with."""
    return f"{run.run_id}.{run.attempt}"


def run_of(owner: str) -> str:
    """
    >>> run_of("first.try.2")
    'first.try'
    """
    return owner.rpartition(".")[0]


async def running_owners(client: Client, addresses: Collection[str]) -> dict[str, set[str] | None]:
    """Whose tasks each of these workers runs, whether or not Dask still wants them; None for one that does
    not say."""
    answers = await asyncio.gather(*(_ask(client, address) for address in addresses))
    return dict(zip(addresses, answers, strict=True))


async def _ask(client: Client, address: str) -> set[str] | None:
    asked = client.run(_owners, workers=[address], on_error="ignore")
    try:
        return set((await asyncio.wait_for(asked, ANSWER_S)).get(address, ()))
    except TimeoutError:
        return None


def _owners(dask_worker: Any) -> list[str]:
    """Runs on a worker. A task that was given up while it ran is still among its tasks."""
    tasks = (dask_worker.state.tasks.get(key) for key in dask_worker.active_threads.values())
    annotations = [task.annotations or {} for task in tasks if task is not None]
    return [found["owner"] for found in annotations if "owner" in found]
