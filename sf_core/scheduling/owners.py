"""Owners of the tasks on workers: every task is annotated with its owner, one attempt of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from distributed import Client

ANSWER_S = 2.0
"""How long a worker may take to say what it runs."""


def owner_of(run_id: str, attempt: int) -> str:
    """Owner with which the tasks of an attempt are annotated."""
    return f"{run_id}.{attempt}"


def run_of(owner: str) -> str:
    """
    >>> run_of("first.try.2")
    'first.try'
    """
    return owner.rpartition(".")[0]


async def running_owners(client: Client, addresses: Collection[str]) -> dict[str, set[str] | None]:
    """Owners of the tasks that each worker runs, by its address, whether or not Dask still wants those tasks;
    None for a worker that does not answer in time."""
    answers = await asyncio.gather(*(_ask(client, address) for address in addresses))
    return dict(zip(addresses, answers, strict=True))


async def _ask(client: Client, address: str) -> set[str] | None:
    asked = client.run(_owners, workers=[address], on_error="ignore")
    try:
        return set((await asyncio.wait_for(asked, ANSWER_S)).get(address, ()))
    except TimeoutError:
        return None


def _owners(dask_worker: Any) -> list[str]:
    """Executed on a worker, whose tasks still include one that was given up while it ran."""
    tasks = (dask_worker.state.tasks.get(key) for key in dask_worker.active_threads.values())
    annotations = [task.annotations or {} for task in tasks if task is not None]
    return [found["owner"] for found in annotations if "owner" in found]
