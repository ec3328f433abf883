"""Ending by force what holds a device and does not let go."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import Client

from sf_core.scheduling.plan import connected_workers, our_workers

KILL_S = 30.0
"""How long the nanny may take; it asks for 4 s, then kills."""

POLL_S = 0.2
ANSWER_S = 2.0
"""A worker that says nothing for so long counts as busy: it hangs, and may hold its device."""


def end_by_force(scheduler: str, worker: str) -> bool:
    """Kill the process of this worker; its nanny starts another one, and Dask runs there again what was
    running or queued. False if no such worker is connected, that is, if its process is gone already."""
    with Client(scheduler, set_as_default=False) as client:
        connected = connected_workers(client)
        found = [address for address, known in connected.items() if known.name == worker]
        if found:
            client.restart_workers(found, timeout=KILL_S, raise_for_error=False)
    return bool(found)


def end_tasks(scheduler: str, owner: str, patience_s: float) -> list[str]:
    """Return when no worker runs a task annotated with this owner, whether or not Dask still wants it. Those
    that do after `patience_s` are ended by force; returns their names. A task that Dask wants is run again,
    so the caller gives it up first. Raises OSError if the scheduler does not answer."""
    return asyncio.run(_end_tasks(scheduler, owner, patience_s))


async def _end_tasks(scheduler: str, owner: str, patience_s: float) -> list[str]:
    deadline = time.monotonic() + patience_s
    async with Client(scheduler, asynchronous=True, set_as_default=False, timeout=ANSWER_S) as client:
        while busy := await _busy(client, owner):
            if time.monotonic() > deadline:
                await client.restart_workers(list(busy), timeout=KILL_S, raise_for_error=False)
                return sorted(busy.values())
            await asyncio.sleep(POLL_S)
    return []


async def _busy(client: Client, owner: str) -> dict[str, str]:
    """Names of the workers that run a task of this owner, by address."""
    workers = our_workers((await client.scheduler.identity(n_workers=-1))["workers"])
    answers = await asyncio.gather(*(_runs_task(client, address, owner) for address in workers))
    return {
        address: worker.name
        for (address, worker), is_busy in zip(workers.items(), answers, strict=True)
        if is_busy
    }


async def _runs_task(client: Client, address: str, owner: str) -> bool:
    asked = client.run(_runs, owner, workers=[address], on_error="ignore")
    try:
        return bool((await asyncio.wait_for(asked, ANSWER_S)).get(address))
    except TimeoutError:
        return True


def _runs(owner: str, dask_worker: Any) -> bool:
    """Runs on a worker. A task that was given up while it ran is still among its tasks."""
    tasks = (dask_worker.state.tasks.get(key) for key in dask_worker.active_threads.values())
    return any(task is not None and (task.annotations or {}).get("owner") == owner for task in tasks)
