"""Deploying to a real Prefect server, and a run that a worker takes from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun

from sf_core.config import RunConfig
from tests.e2e.conftest import Cluster, manifests, wait_until
from tests.e2e.prefect_server import Server, prefect_server
from tests.e2e.quickstart import CONFIG, ROOT

pytestmark = pytest.mark.slow

DEPLOYMENTS = {
    "quickstart": "train/quickstart",
    "train": "train/train",
    "warmstart": "warmstart/warmstart",
    "evaluate": "evaluate/evaluate",
}


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    env = {
        "PYTHONPATH": str(cluster.user_code),
        "SF_SCHEDULER": cluster.services.scheduler,
        "SF_DATAPLANE_URL": cluster.services.dataplane,
    }
    with prefect_server(tmp_path_factory.mktemp("server"), env) as server:
        server.deploy()
        yield server


def small(cluster: Cluster, run_id: str) -> RunConfig:
    """A run of few sessions that names neither scheduler nor data plane."""
    config = cluster.config(run_id)
    return config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"scheduler": None}),
            "dataplane": config.dataplane.model_copy(update={"url": None}),
        }
    )


def await_end(server: Server, run: FlowRun, timeout_s: float) -> FlowRun:
    def ended() -> FlowRun | None:
        with server.client() as client:
            now = client.read_flow_run(run.id)
        return now if now.state and now.state.is_final() else None

    ended_run: FlowRun = wait_until(ended, f"the end of {run.name}", timeout_s, every_s=0.5)
    return ended_run


def test_every_deployment_is_there_with_its_form_in_a_pool_for_one_run(server: Server) -> None:
    with server.client() as client:
        assert client.read_work_pool("sf").concurrency_limit == 1
        for name, full_name in DEPLOYMENTS.items():
            deployment = client.read_deployment_by_name(full_name)
            assert (deployment.work_pool_name, deployment.tags) == ("sf", ["seamlessflow"])
            assert deployment.description and deployment.enforce_parameter_schema
            assert list(deployment.parameter_openapi_schema["properties"]) == ["config"]
            assert "config" in deployment.parameters, name


def test_the_deployed_quickstart_is_the_one_of_the_configuration() -> None:
    described = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    parameters = next(d["parameters"] for d in described if d["name"] == "quickstart")
    with open(CONFIG) as file:
        assert parameters == {"config": yaml.safe_load(file)}


def test_a_deployed_run_is_taken_by_a_worker_and_completes(server: Server, cluster: Cluster) -> None:
    config = small(cluster, "deployed")
    command = ["-m", "prefect", "worker", "start", "--pool", "sf", "--type", "process"]
    worker = server.stack.start("worker", [sys.executable, *command], {"PREFECT_API_URL": server.api})
    with server.client() as client:
        deployment = client.read_deployment_by_name(DEPLOYMENTS["quickstart"])
        parameters = {"config": config.model_dump(mode="json")}
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
    ended = await_end(server, run, 150)
    server.stack.stop_one(worker)
    assert ended.state and ended.state.is_completed(), f"{ended.state} {worker.tail(30)}"
    assert ended.name == "deployed"
    assert (2, "publish") in manifests(config)
