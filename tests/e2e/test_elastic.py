"""Workers that join a run and workers that leave it for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pyarrow.parquet as pq
import pytest

from sf_core.config import RunConfig, WorkerConfig
from sf_core.local_stack import start_dask_worker
from sf_core.scheduling.plan import read_workers
from storage.run_directory import RunDirectory
from tests.e2e.conftest import Cluster, spans
from tests.e2e.invariants import check_result, manifests
from tests.e2e.waiting import wait_until

pytestmark = pytest.mark.slow


def start_worker(cluster: Cluster, name: str, *tags: str) -> None:
    worker = WorkerConfig(tags=tags, threads=1)
    start_dask_worker(cluster.stack, name, worker, cluster.services.scheduler, cluster.folder)


def end_worker(cluster: Cluster, name: str) -> None:
    """The worker and its nanny, by force."""
    process = cluster.stack.processes[f"worker-{name}"]
    nanny = psutil.Process(process.pid())
    for member in (nanny, *nanny.children(recursive=True)):
        member.kill()
    cluster.stack.remove(process)


@contextmanager
def restored(cluster: Cluster) -> Iterator[None]:
    """Other tests find the workers that they expect."""
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


def test_a_rollout_worker_joins_is_caught_up_and_carries_on_when_the_first_is_lost(cluster: Cluster) -> None:
    config = cluster.config("elastic", "async", train={"iterations": 4})
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


def test_rewards_are_scored_on_reward_workers_and_agents_follow_the_queue(cluster: Cluster) -> None:
    environment = {
        "tasks": "tests.e2e.echo_package:tasks",
        "agent": "tests.e2e.echo_package:slowly_held_out",
        "reward": "tests.e2e.echo_package:reward_with_worker",
    }
    config = cluster.config(
        "elastic-runners",
        "disaggregated",
        environment=environment,
        rollout={"concurrency": 2},
        train={"iterations": 2},
        evaluate={"num_tasks": 1},
        cluster={"elastic": {"agent": {"min": 1, "max": 2, "idle_s": 0.5}}},
    )
    url = f"{cluster.services.dataplane}/runs/elastic-runners"

    def holders() -> set[str]:
        """Workers of runners that go on."""
        answer = httpx.get(url)
        runners = answer.json()["runners"] if answer.is_success else {}
        return {name.partition(":")[0] for name, runner in runners.items() if not runner["retiring"]}

    with restored(cluster):
        start_worker(cluster, "a1", "agent")
        start_worker(cluster, "s0", "reward")
        wait_until(lambda: {"a1", "s0"} <= connected(cluster), "workers", 180, 0.2)
        process = cluster.start(config)
        for wanted in ({"a0", "a1", "s0"}, {"a0", "s0"}):
            wait_until(lambda w=wanted: holders() == w or process.poll() is not None, f"{wanted}", 180, 0.1)
            assert process.poll() is None, cluster.log(config)[-2000:]
        cluster.finish(config, process)
    check_result(config)
    directory = RunDirectory(config.run_dir)
    manifest = directory.read_manifest(1, "rollout")
    assert manifest is not None
    rows = pq.ParquetFile(directory.path(manifest.outputs[0].uri)).read(["reward_parts"])
    assert {part for parts in rows["reward_parts"].to_pylist() for part, _ in parts} == {"correct", "by_s0"}
