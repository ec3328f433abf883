"""Workers that join and leave a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from sf_core.cli.stack.local import start_dask_worker
from sf_core.config import RunConfig, WorkerConfig
from sf_core.scheduling.cluster import read_workers
from tests.bench.stacks.cluster import Cluster
from tests.bench.waits import wait_until


def start_worker(cluster: Cluster, name: str, *tags: str) -> None:
    worker = WorkerConfig(tags=tags, threads=1)
    start_dask_worker(cluster.stack, name, worker, cluster.services.scheduler, cluster.folder)


def end_worker(cluster: Cluster, name: str) -> None:
    """Kill a worker and its nanny."""
    process = cluster.stack.processes[f"worker-{name}"]
    nanny = psutil.Process(process.pid())
    for member in (nanny, *nanny.children(recursive=True)):
        # without its nanny the rest ends by itself
        with suppress(psutil.NoSuchProcess):
            member.kill()
    cluster.stack.remove(process)


@contextmanager
def restored(cluster: Cluster) -> Iterator[None]:
    """Restore the usual workers at the end, for other tests."""
    wanted = RunConfig().cluster.workers
    try:
        yield
    finally:
        running = {p.removeprefix("worker-") for p in cluster.stack.processes if "worker-" in p}
        for name in running - wanted.keys():
            end_worker(cluster, name)
        for name in wanted.keys() - running:
            start_worker(cluster, name, *wanted[name].tags)
        wait_until(lambda: connected(cluster) == wanted.keys(), "the usual workers", every_s=0.2)


def connected(cluster: Cluster) -> set[str]:
    return {worker.name for worker in read_workers(cluster.services.scheduler)}
