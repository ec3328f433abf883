"""tasks/lease.py with a real data plane, and Dask in this process. What follows from facts is tested in
tests/sf_core/scheduling/test_leases.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from distributed import Client
from distributed.scheduler import KilledWorker, NoValidWorkerError

from sf_core.scheduling.leases import Lease
from sf_core.scheduling.plan import Plan, Worker
from sf_core.stages.run import RunRef
from storage.run_directory import RunDirectory
from tasks.cluster import TaskFuture, end_of
from tasks.lease import HELD_BY, Leases
from tests import bench
from tests.bench.dataplane.planes import ServedPlane
from tests.tasks import states


@pytest.fixture(scope="module")
def local_client() -> Iterator[Client]:
    with Client(processes=False, n_workers=1, dashboard_address=None, set_as_default=False) as client:
        yield client


class Cluster:
    """Futures of the leases that are submitted: queued unless it is told how a worker's lease ends."""

    def __init__(self, client: Client) -> None:
        self._client = client
        tags = {"r0": "rollout", "a0": "agent", "a1": "agent"}
        self.workers = {f"tcp://{name}": Worker(name, frozenset({tag})) for name, tag in tags.items()}
        self.submitted: list[str] = []
        self.ends: dict[str, TaskFuture] = {}

    def submit(self, task: Any, run: RunRef, spec: Lease, *, worker: str) -> TaskFuture:
        assert task.name == {"agent": "agents", "rollout": "lease"}[spec.duty]
        self.submitted.append(spec.holder)
        return self.ends.get(worker) or states.queued(self._client)


@pytest.fixture
def cluster(local_client: Client, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(local_client)
    monkeypatch.setattr("tasks.lease.dask_client", lambda: local_client)
    monkeypatch.setattr("tasks.lease.list_connected", lambda local_client: dict(cluster.workers))
    monkeypatch.setattr("tasks.lease.submit", cluster.submit)
    monkeypatch.setattr("tasks.lease.LOOK_S", 0.02)
    monkeypatch.setattr("tasks.lease.RELEASED_S", 0.1)
    return cluster


@pytest.fixture
def leases(tmp_path: Path, served_plane: ServedPlane, cluster: Cluster) -> Leases:
    run = RunDirectory(str(tmp_path / "run"))
    bench.runs.configure(run)
    plan = Plan(rollout=("r0",), trainers=(), lent=False, agent=("a0", "a1"))
    return Leases(RunRef("run", run.uri, served_plane.url, attempt=1), plan)


@pytest.mark.parametrize(
    ("lease", "name"),
    [
        (Lease("agent", "a0", "a0-2.1"), "agents on a0"),
        (Lease("reward", "w0", "w0-3.1"), "rewards on w0"),
        (Lease("rollout", "r0", "r0-1.1"), "rollout on r0"),
        (
            Lease("rollout", "t0", "t0-4.1", after=None, trainers=("t0",)),
            "rollout on t0, lent until iteration 0 trains",
        ),
        (
            Lease("rollout", "t0", "t0-5.1", after=4, trainers=("t0",)),
            "rollout on t0, lent after iteration 4 has trained",
        ),
    ],
)
def test_the_name_of_a_lease_in_prefect_says_who_is_held_for_what_and_when(lease: Lease, name: str) -> None:
    template = HELD_BY[lease.duty].task_run_name
    assert isinstance(template, str) and template.format(spec=lease) == name


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (ConnectionError("no claim of r0:r0-0.1 was answered"), "lost"),
        (httpx.ConnectError("refused"), "lost"),
        (NoValidWorkerError("lease", {}, {}, {"@r0": 1}, 300.0), "lost"),
        (KilledWorker("lease", SimpleNamespace(address="tcp://r0"), 3), "lost"),
        (ValueError("no such agent"), "failed"),
    ],
)
def test_only_what_a_lease_cannot_help_is_a_loss(local_client: Client, error: Exception, how: str) -> None:
    end = end_of(states.failed(local_client, error))
    assert end is not None
    assert (end.how, type(end.error), str(end.error)) == (how, type(error), str(error))


def test_how_a_lease_ended_is_what_it_returned(local_client: Client) -> None:
    assert end_of(states.queued(local_client)) is None
    ends = [end_of(states.completed(local_client, data)) for data in ("revoked", "training comes first", 7)]
    assert [end.how for end in ends if end] == ["revoked", "returned", "returned"]


def test_a_worker_that_does_not_say_how_its_lease_ended_is_asked_again(
    local_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.cluster.STATE_S", 0.05)
    [worker] = local_client.cluster.workers.values()
    answer = worker.handlers["get_data"]
    may_answer = asyncio.Event()

    async def answer_later(comm: Any, **question: Any) -> Any:
        await may_answer.wait()
        return await answer(comm, **question)

    worker.handlers["get_data"] = answer_later
    returned = states.completed(local_client)

    def how() -> str | None:
        end = end_of(returned)
        return end and end.how

    assert how() == "unknown"
    worker.handlers["get_data"] = answer
    assert local_client.loop is not None
    local_client.loop.add_callback(may_answer.set)
    bench.waits.wait_until(lambda: how() == "returned", "its answer")


def test_a_worker_that_joins_gets_a_lease_and_all_are_released_at_the_end(
    leases: Leases, cluster: Cluster, served_plane: ServedPlane, caplog: pytest.LogCaptureFixture
) -> None:
    served_plane.register()
    with leases:
        assert cluster.submitted == ["a0:a0-0.1", "a1:a1-1.1", "r0:r0-2.1"]
        cluster.workers["tcp://a2"] = Worker("a2", frozenset({"agent"}))
        bench.waits.wait_until(lambda: cluster.submitted[3:] == ["a2:a2-3.1"], "a lease of a2")
        served_plane.claim(1, runner="a0:a0-0.1")
    assert served_plane.get("/runs/run")["released"]
    assert "lease a0-0.1 was released but did not end" in caplog.messages


def test_a_lost_worker_is_named_in_the_log_with_the_place_where_the_run_continues(
    leases: Leases, cluster: Cluster, served_plane: ServedPlane, caplog: pytest.LogCaptureFixture
) -> None:
    served_plane.register()
    with leases:
        cluster.workers["tcp://r0-restarted"] = cluster.workers.pop("tcp://r0")
        told = "worker r0 was lost and is back: its answers continue there"
        bench.waits.wait_until(lambda: told in caplog.messages, "the sentence")


def test_a_run_whose_agents_all_fail_is_released_and_ends_with_their_error(
    leases: Leases, cluster: Cluster, served_plane: ServedPlane, local_client: Client
) -> None:
    served_plane.register()
    failure = ValueError("module my_agent has no agent")
    cluster.ends = {"a0": states.failed(local_client, failure), "a1": states.failed(local_client, failure)}
    with pytest.raises(ValueError, match="module my_agent has no agent"), leases:
        bench.waits.wait_until(lambda: served_plane.get("/runs/run")["released"], "the end of the run")
        raise RuntimeError("the run was released")


def test_a_lease_that_failed_while_others_did_its_work_is_an_error_at_the_end(
    leases: Leases, cluster: Cluster, served_plane: ServedPlane, local_client: Client
) -> None:
    served_plane.register()
    cluster.ends = {"a0": states.failed(local_client, ValueError("only here"))}
    with pytest.raises(ValueError, match="only here"), leases:
        bench.waits.wait_until(lambda: "a1:a1-1.1" in cluster.submitted, "another agent")
    assert served_plane.get("/runs/run")["released"]


def test_leases_that_cannot_be_released_do_not_hide_how_the_run_ended(
    leases: Leases, served_plane: ServedPlane, caplog: pytest.LogCaptureFixture
) -> None:
    assert served_plane.http.get("/runs/run").status_code == 404
    with leases:
        pass
    [message] = [record.message for record in caplog.records if record.name == "tasks.lease"]
    assert message.startswith("the leases cannot be released now and will end later: GET /")
