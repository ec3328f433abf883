"""Ending by force what holds a device and does not let go."""

from __future__ import annotations

from distributed import Client

from sf_core.scheduling.plan import connected_workers

KILL_S = 30.0
"""How long the nanny may take; it asks for 4 s, then kills."""


def end_by_force(scheduler: str, worker: str) -> bool:
    """Kill the process of this worker; its nanny starts another one, and Dask runs there again what was
    running or queued. False if no such worker is connected, that is, if its process is gone already."""
    with Client(scheduler, set_as_default=False) as client:
        connected = connected_workers(client)
        found = [address for address, known in connected.items() if known.name == worker]
        if found:
            client.restart_workers(found, timeout=KILL_S, raise_for_error=False)
    return bool(found)
