"""tasks/gang.py with a real data plane, and Dask in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from prefect.context import FlowRunContext

from sf_core.stages.lease import LeaseSpec
from sf_core.stages.run import RunRef
from storage.gangs import GangFiles
from storage.run_directory import RunDirectory
from tasks.cluster import TaggedTaskRunner
from tasks.gang import Future, Gang
from tests.sf_core.dataplane.conftest import model_dir  # noqa: F401
from tests.sf_core.dataplane.stand import Server
from tests.sf_core.runs import configure
from tests.tasks.test_lease import completed, failed, queued, server  # noqa: F401


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
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
def run(tmp_path: Path, server: Server) -> RunRef:  # noqa: F811
    directory = RunDirectory(str(tmp_path / "run"))
    configure(directory)
    server.register()
    return RunRef("run", directory.uri, server.url, attempt=1)


def gang_of(run: RunRef, rank: Future) -> Gang:
    """A gang of one rank, already submitted to t0."""
    gang = Gang(run, 0, ("t0",))
    gang._epoch, gang._ranks = 0, {"t0": rank}
    return gang


def test_training_takes_a_device_that_was_lent_again_since_the_iteration_began(
    client: Client,
    server: Server,  # noqa: F811
    run: RunRef,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loan = LeaseSpec(run, "t0", "t0-1.1")
    server.connect(lambda ids, seed: [1], loan.lease_id, engine_id=loan.holder, worker="t0")

    def begin() -> None:
        server.wait_for(lambda: loan.lease_id in server.reasons)
        GangFiles(RunDirectory(run.uri), 0, 1, 0).take_seat(0, once=True)

    rank = threading.Thread(target=begin)
    rank.start()
    gang_of(run, queued(client)).take_devices([("t0", "t0-0.1")])
    rank.join()
    assert server.reasons == {loan.lease_id: "revoked"}
    assert "did not yield" not in caplog.text


def test_whether_rank_0_has_returned_is_told_apart_from_the_commit(client: Client, run: RunRef) -> None:
    assert gang_of(run, completed(client)).has_returned()
    assert not gang_of(run, failed(client, RuntimeError("the others were gone"))).has_returned()
    assert Gang(run, 0, ()).has_returned()


def test_a_rank_0_that_was_lost_with_its_worker_has_not_returned(
    client: Client, run: RunRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.cluster.STATE_S", 0.05)
    assert not gang_of(run, queued(client)).has_returned()
