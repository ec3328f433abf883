"""Cancel when nothing yields by itself; test_browser.py cancels a run that yields."""

from __future__ import annotations

import pytest
from prefect.states import Cancelling

from tests.bench.stacks import prefect_server
from tests.bench.stacks.cluster import Cluster
from tests.bench.waits import wait_until


@pytest.mark.nightly
def test_a_worker_that_goes_on_computing_is_ended_by_force(
    server: prefect_server.Server, cluster: Cluster
) -> None:
    policy = {"hidden_size": 32, "num_layers": 1, "warmstart": {"steps": 10**6}}
    config = prefect_server.without_addresses(cluster.config("endless", policy=policy))
    with server.worker() as worker:
        before = cluster.worker_process("t0")
        run = server.create_run(prefect_server.DEPLOYMENTS["train"], config.model_dump(mode="json"))
        wait_until(lambda: len(cluster.running_tasks()) == 1, "the warm start", every_s=0.5)
        server.await_state(run, "Running", worker=worker)
        with server.client() as client:
            client.set_flow_run_state(run.id, Cancelling())
        wait_until(lambda: not before.is_running(), "the process of t0 to end", every_s=0.2)
        server.await_state(run, "Cancelled")
        assert not cluster.running_tasks()
        assert "tasks still running after 5 s are killed: t0" in server.logs(run)
