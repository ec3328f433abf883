"""Workers that join a run and workers that leave it for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from sf_core.config import RunConfig, WorkerConfig
from sf_core.local_stack import start_dask_worker
from sf_core.scheduling.plan import read_workers
from tests.e2e.conftest import Cluster, manifests, spans
from tests.e2e.test_resume import check_result
from tests.e2e.waiting import wait_until

pytestmark = pytest.mark.slow


def start_worker(cluster: Cluster, name: str, *tags: str) -> None:
    worker = WorkerConfig(tags=tags, threads=1)
    start_dask_worker(cluster.stack, name, worker, [cluster.services.scheduler], cluster.folder)


def end_worker(cluster: Cluster, name: str) -> None:
    """The worker and its nanny, by force."""
    process = next(p for p in cluster.stack.processes if p.name == f"worker-{name}")
    cluster.stack.stop_one(process, grace_s=0)


@contextmanager
def restored(cluster: Cluster) -> Iterator[None]:
    """Other tests find the workers that they expect."""
    wanted = RunConfig().cluster.workers
    try:
        yield
    finally:
        running = {p.name.removeprefix("worker-") for p in cluster.stack.processes if "worker-" in p.name}
        for name in running - wanted.keys():
            end_worker(cluster, name)
        for name in wanted.keys() - running:
            start_worker(cluster, name, *wanted[name].tags)
        wait_until(lambda: connected(cluster) == wanted.keys(), "the usual workers", every_s=0.2)


def connected(cluster: Cluster) -> set[str]:
    return {worker.name for worker in read_workers(cluster.services.scheduler)}


def test_a_rollout_worker_joins_is_caught_up_and_carries_on_when_the_first_is_lost(cluster: Cluster) -> None:
    config = cluster.config("elastic", "async", train={"iterations": 6})
    url = f"{cluster.services.dataplane}/runs/elastic"
    with restored(cluster):
        process = cluster.start(config)
        wait_until(lambda: (1, "publish") in manifests(config) or process.poll() is not None, "2", 180)
        # nothing ends while nothing is sampled: there is time to join
        httpx.post(f"{url}/pause", json={"mode": "freeze"}).raise_for_status()
        start_worker(cluster, "r1", "rollout")

        def versions() -> dict[str, int | None]:
            return {engine["worker"]: engine["version"] for engine in httpx.get(url).json()["engines"]}

        wait_until(lambda: versions().get("r1") is not None or process.poll() is not None, "r1", 180, 0.1)
        newest = httpx.get(url).json()["version"]
        assert versions() == {"r0": newest, "r1": newest}, cluster.log(config)[-2000:]
        end_worker(cluster, "r0")
        httpx.post(f"{url}/resume", json={}).raise_for_status()
        cluster.finish(config, process)
    check_result(config)
    sampled = [span for span in spans(config, "rollout") if span.worker == "r1"]
    assert sum(span.tokens for span in sampled) > 0
    assert min(span.version or 0 for span in sampled) >= 2
