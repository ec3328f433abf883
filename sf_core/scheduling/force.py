"""Forced end of worker processes that hold a device and do not yield it."""

from __future__ import annotations

import asyncio
import time

from distributed import Client

from sf_core.scheduling.owners import ANSWER_S, running_owners
from sf_core.scheduling.plan import connected_workers, our_workers

KILL_S = 30.0
"""How long a nanny may take to restart its worker; it asks for 4 s, then kills."""

POLL_S = 0.2


def kill_worker(scheduler: str, worker: str) -> bool:
    """Kill the process of this worker; its nanny starts another one, and Dask runs there again what was
    running or queued. False if no such worker is connected, that is, if its process is gone already."""
    with Client(scheduler, set_as_default=False) as client:
        connected = connected_workers(client)
        found = [address for address, known in connected.items() if known.name == worker]
        if found:
            client.restart_workers(found, timeout=KILL_S, raise_for_error=False)
    return bool(found)


def end_tasks(scheduler: str, owner: str, patience_s: float) -> list[str]:
    """Wait until no worker runs a task annotated with this owner, whether or not Dask still wants it. Workers
    that do after `patience_s` are killed; returns their names. Dask would run a task that it wants again, so
    the caller gives it up first. Raises OSError if the scheduler does not answer."""
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
    """Names of the workers that run a task of this owner, by address. A worker that does not
    answer hangs and may hold its device, so it counts too."""
    workers = our_workers((await client.scheduler.identity(n_workers=-1))["workers"])
    running = await running_owners(client, workers)
    return {
        address: worker.name
        for address, worker in workers.items()
        if (owners := running[address]) is None or owner in owners
    }
