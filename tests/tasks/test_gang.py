"""tasks/gang.py with a real data plane, and Dask in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from distributed.scheduler import NoValidWorkerError
from prefect.context import FlowRunContext

from sf_core.scheduling.leases import Lease
from sf_core.stages.run import RunRef
from storage.gangs import GangFiles
from storage.run_directory import RunDirectory
from tasks.cluster import TaggedTaskRunner, TaskFuture
from tasks.gang import Gang
from tests import bench
from tests.bench.dataplane.planes import ServedPlane
from tests.tasks import states


@pytest.fixture(scope="module")
def flow_client() -> Iterator[Client]:
    """Dask client of a flow whose cluster has a worker t0."""
    resources = {"@t0": 1, "rollout": 1, "train": 1}
    with (
        LocalCluster(processes=False, n_workers=1, dashboard_address=None, resources=resources) as cluster,
        TaggedTaskRunner(address=cluster.scheduler_address) as runner,
    ):
        known: dict[str, Any] = {"task_runner": runner}
        with FlowRunContext.model_construct(**known):
            yield runner.client


@pytest.fixture
def run_ref(tmp_path: Path, served_plane: ServedPlane) -> RunRef:
    directory = RunDirectory(str(tmp_path / "run"))
    bench.runs.configure(directory)
    served_plane.register()
    return RunRef("run", directory.uri, served_plane.url, attempt=1)


@pytest.fixture
def gang_of(
    flow_client: Client, run_ref: RunRef, monkeypatch: pytest.MonkeyPatch
) -> Callable[[TaskFuture], Gang]:
    """Makes a gang of one rank, submitted to t0 as this future."""

    def make(rank: TaskFuture) -> Gang:
        monkeypatch.setattr("tasks.gang.submit", lambda task, run_ref, iteration, assignment, **options: rank)
        gang = Gang(run_ref, 0, ("t0",))
        assert gang.submit([]) == [rank]
        return gang

    return make


def test_training_takes_a_device_that_was_lent_again_since_the_iteration_began(
    flow_client: Client,
    served_plane: ServedPlane,
    run_ref: RunRef,
    gang_of: Callable[[TaskFuture], Gang],
    caplog: pytest.LogCaptureFixture,
) -> None:
    loan = Lease("rollout", "t0", "t0-1.1")
    served_plane.connect(lambda ids, seed: [1], loan.lease_id, engine_id=loan.holder, worker="t0")

    def begin() -> None:
        bench.waits.wait_until(lambda: loan.lease_id in served_plane.reasons)
        GangFiles(RunDirectory(run_ref.uri), 0, 1, 0).begin_rank(0, once=True)

    rank = threading.Thread(target=begin)
    rank.start()
    gang_of(states.queued(flow_client)).revoke_first([("t0", "t0-0.1")])
    rank.join()
    assert served_plane.reasons == {loan.lease_id: "revoked"}
    assert "did not free its device" not in caplog.text


def test_whether_rank_0_has_returned_is_told_apart_from_the_commit(
    flow_client: Client, run_ref: RunRef, gang_of: Callable[[TaskFuture], Gang]
) -> None:
    assert gang_of(states.completed(flow_client)).has_returned()
    assert not gang_of(states.failed(flow_client, RuntimeError("the others were gone"))).has_returned()
    assert Gang(run_ref, 0, ()).has_returned()


def test_a_rank_0_that_was_lost_with_its_worker_has_not_returned(
    flow_client: Client, gang_of: Callable[[TaskFuture], Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.cluster.STATE_S", 0.05)
    assert not gang_of(states.queued(flow_client)).has_returned()


def test_the_error_of_a_gang_that_has_failed_as_a_whole_is_raised_and_a_commit_counts_more(
    flow_client: Client, run_ref: RunRef, gang_of: Callable[[TaskFuture], Gang]
) -> None:
    gang = gang_of(states.failed(flow_client, ValueError("the batch is empty")))
    with pytest.raises(ValueError, match="the batch is empty"):
        gang.has_committed()
    bench.runs.commit(RunDirectory(run_ref.uri), 0, "train")
    assert gang.has_committed()


def test_a_rank_that_dask_lost_is_tried_again_on_the_worker_that_is_there(
    flow_client: Client,
    run_ref: RunRef,
    gang_of: Callable[[TaskFuture], Gang],
    caplog: pytest.LogCaptureFixture,
) -> None:
    gang = gang_of(states.failed(flow_client, NoValidWorkerError("train", set(), set(), {"@t0": 1}, 300.0)))
    assert not gang.has_committed()
    assert "training of iteration 0: retry on t0" in caplog.messages
