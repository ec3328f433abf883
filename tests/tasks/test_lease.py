from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from distributed import Client
from prefect.states import State, exception_to_failed_state
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.run import RunRef
from sf_core.scheduling.lease import LeaseSpec
from sf_core.scheduling.plan import Plan
from storage.run_directory import RunDirectory
from tasks.lease import AGAIN_S, Future, Leases, _has_ended
from tests.sf_core.dataplane.conftest import model_dir  # noqa: F401
from tests.sf_core.dataplane.stand import Server, attended, running_app
from tests.sf_core.runs import configure


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client(processes=False, n_workers=1, dashboard_address=None, set_as_default=False) as client:
        yield client


def failed(client: Client, error: BaseException) -> Future:
    """A task that raised this."""
    state: State[object] | None = run_coro_as_sync(exception_to_failed_state(error))
    future = client.submit(lambda: state, pure=False)
    future.result()
    return PrefectDaskFuture(uuid.uuid4(), future)


def queued(client: Client) -> Future:
    return PrefectDaskFuture(uuid.uuid4(), client.submit(int, pure=False, resources={"@nobody": 1}))


@pytest.fixture
def server(tmp_path: Path, model_dir: str) -> Iterator[Server]:  # noqa: F811
    with running_app() as url, attended(url, tmp_path, model_dir) as server:
        yield server


@pytest.fixture
def leases(tmp_path: Path, server: Server) -> Leases:
    run = RunDirectory(str(tmp_path / "run"))
    configure(run, cluster={"elastic": {"agent": {"min": 1, "max": 2}}})
    plan = Plan(rollout=("r0",), trainers=(), lent=False, agent=("a0", "a1"))
    return Leases(RunRef("run", run.uri, server.url, attempt=1), plan)


def lost(spec: LeaseSpec) -> ConnectionError:
    return ConnectionError(f"no claim of {spec.holder} was answered")


def test_a_worker_whose_lease_was_lost_is_held_again_but_not_all_the_time(
    leases: Leases, client: Client
) -> None:
    spec = leases._spec("r0")
    leases._held["rollout", "r0"] = spec, failed(client, lost(spec))
    leases._held_since["rollout", "r0"] = float("inf")
    assert not leases._is_free("rollout", "r0")
    leases._held_since["rollout", "r0"] = -AGAIN_S
    assert leases._is_free("rollout", "r0")


def test_a_lease_that_was_lost_does_not_end_the_run_and_one_that_failed_does(
    leases: Leases, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    spec = leases._spec("r0")
    assert not _has_ended(spec, queued(client), is_there=True)
    assert _has_ended(spec, failed(client, lost(spec)), is_there=True)
    assert "lease r0-0.1 was lost (ConnectionError: no claim of r0:r0-0.1 was answered)" in caplog.messages
    with pytest.raises(ValueError, match="no such agent"):
        _has_ended(spec, failed(client, ValueError("no such agent")), is_there=True)


def test_a_runner_too_many_is_retired_when_the_data_plane_knows_it(
    leases: Leases, client: Client, server: Server
) -> None:
    server.register(groups_per_batch=1, num_batches=1)
    for worker in ("a0", "a1"):
        leases._held["agent", worker] = leases._spec(worker), queued(client)

    def retiring() -> dict[str, bool]:
        return {name: runner["retiring"] for name, runner in server.get("/runs/run")["runners"].items()}

    # a0 is not there yet: the one that is there goes on
    server.claim(0, runner="a1:a1-1.1")
    leases._adapt("agent", ["a0", "a1"])
    assert retiring() == {"a1:a1-1.1": False}
    server.claim(0, runner="a0:a0-0.1")
    leases._adapt("agent", ["a0", "a1"])
    assert retiring() == {"a0:a0-0.1": False, "a1:a1-1.1": True}


def test_leases_that_cannot_be_released_do_not_hide_how_the_run_ended(
    leases: Leases, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    assert httpx.get(f"{server.url}/runs/run").status_code == 404
    assert leases._release() == set()
    [message] = caplog.messages
    assert message.startswith("the leases end by themselves, later, because they cannot be released: GET /")
