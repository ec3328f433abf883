"""One real stack for all end-to-end tests: Prefect server, Dask workers, data plane, each its own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sf_core.config import RunConfig
from sf_core.stages.preflight.stored_config import read_stored_config
from tests.bench.stacks.cluster import Cluster, running_cluster
from tests.bench.stacks.prefect_server import Server, prefect_server
from tests.bench.stacks.quickstart import CONFIG, options, sf
from tests.e2e.postgresql import postgresql


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, s3_bucket: str
) -> Iterator[Cluster]:
    """Cluster whose processes inherit the variables of the bucket. Warm starts outlast the session, cached by
    the code that makes them."""
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("warmstarts")
    with running_cluster(tmp_path_factory.mktemp("cluster"), cache, RunConfig().cluster.workers) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_flow_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails must not fail those after it."""
    cluster = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if cluster is not None:
        cluster.end_flows()


@pytest.fixture(scope="session")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prefect server with our deployments, whose runs use the cluster. It is on PostgreSQL, because on
    SQLite (test_standing_stack.py) automations miss events that meet a locked database."""
    with postgresql() as url:
        env = {
            "PREFECT_API_DATABASE_CONNECTION_URL": url,
            "PYTHONPATH": str(cluster.user_code),
            "SF_SCHEDULER": cluster.services.scheduler,
            "SF_DATAPLANE_URL": cluster.services.dataplane,
        }
        with prefect_server(tmp_path_factory.mktemp("server"), env) as server:
            server.deploy()
            yield server


@pytest.fixture(scope="session")
def quickstart(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The quickstart as configured, but of 12 iterations, evaluated before and after, with a trainer that is
    lent. For all tests that need a run that learned; they only read it."""
    folder = tmp_path_factory.mktemp("quickstart")
    settings = options(run_id="quickstart", pipeline="multiplexed", train__iterations=12, evaluate__every=12)
    done = sf(folder, "train", CONFIG, *settings, on=cluster.services, quiet_s=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_stored_config(str(folder / "runs" / "quickstart"))
