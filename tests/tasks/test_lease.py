from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from distributed import Client
from prefect.states import Completed, State, exception_to_failed_state
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect_dask.task_runners import PrefectDaskFuture

from sf_core.scheduling.plan import Plan
from sf_core.stages.lease import LeaseSpec
from sf_core.stages.run import RunRef
from storage.run_directory import RunDirectory
from tasks.lease import AGAIN_S, Future, Leases, _has_ended
from tests.e2e.waiting import wait_until
from tests.sf_core.dataplane.conftest import model_dir  # noqa: F401
from tests.sf_core.dataplane.stand import Server, attended, running_app
from tests.sf_core.runs import configure


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client(processes=False, n_workers=1, dashboard_address=None, set_as_default=False) as client:
        yield client


def failed(client: Client, error: BaseException) -> Future:
    """Future of a task that raised this error."""
    state: State[object] | None = run_coro_as_sync(exception_to_failed_state(error))
    future = client.submit(lambda: state, pure=False)
    future.result()
    return PrefectDaskFuture(uuid.uuid4(), future)


def completed(client: Client) -> Future:
    state: State[int] = Completed(data=7)
    return PrefectDaskFuture(uuid.uuid4(), client.submit(lambda: state, pure=False))


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
    leases._since["r0"] = float("inf")
    assert not leases._is_free("rollout", "r0")
    leases._since["r0"] = -AGAIN_S
    assert leases._is_free("rollout", "r0")


def test_a_trainer_whose_loan_was_lost_is_lent_again_once_it_is_there(leases: Leases, client: Client) -> None:
    loan, lost_loan, next_loan = (replace(leases._spec("t0"), after=after) for after in (0, 0, 1))
    endings = {loan: queued(client), lost_loan: failed(client, lost(lost_loan)), next_loan: queued(client)}
    leases._lent = list(endings.items())
    leases._plan = replace(leases._plan, trainers=("t0",), lent=True)
    leases._since["t0"] = -AGAIN_S
    assert [spec for spec, _ in leases._lost_loans({"t0", "r0"})] == [lost_loan]
    assert leases._lost_loans({"r0"}) == []
    leases._since["t0"] = float("inf")
    assert leases._lost_loans({"t0"}) == []


def test_a_retired_runner_whose_worker_does_not_say_so_is_not_waited_for(
    leases: Leases, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.cluster.STATE_S", 0.05)
    [worker] = client.cluster.workers.values()
    answer, may_answer = worker.handlers["get_data"], asyncio.Event()

    async def answer_later(comm: Any, **question: Any) -> Any:
        await may_answer.wait()
        return await answer(comm, **question)

    worker.handlers["get_data"] = answer_later
    retired = completed(client)
    wait_until(retired.wrapped_future.done, "its end")
    leases._held["agent", "a0"] = leases._spec("a0"), retired
    assert not leases._is_free("agent", "a0")
    worker.handlers["get_data"] = answer
    assert client.loop is not None
    client.loop.add_callback(may_answer.set)
    wait_until(lambda: leases._is_free("agent", "a0"), "its answer")


def test_a_lease_that_was_lost_does_not_end_the_run_and_one_that_failed_does(
    leases: Leases, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    spec = leases._spec("r0")
    assert not _has_ended(spec, queued(client), is_there=True)
    assert _has_ended(spec, failed(client, lost(spec)), is_there=True)
    assert "lease r0-0.1 was lost (ConnectionError: no claim of r0:r0-0.1 was answered)" in caplog.messages
    with pytest.raises(ValueError, match="no such agent"):
        _has_ended(spec, failed(client, ValueError("no such agent")), is_there=True)


def test_a_failed_lease_is_said_at_once_and_the_run_ends_when_nobody_is_left(
    leases: Leases, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    failure = ValueError("module my_agent has no agent")
    leases._held["agent", "a0"] = leases._spec("a0"), failed(client, failure)
    leases._held["agent", "a1"] = leases._spec("a1"), queued(client)
    leases._held["rollout", "r0"] = leases._spec("r0"), queued(client)
    for _ in range(2):
        leases._note_failures()
    assert caplog.messages == ["lease a0-0.1 failed: ValueError: module my_agent has no agent"]
    assert leases._nobody_left is None
    # one that was lost gets another lease
    leases._held["rollout", "r0"] = leases._spec("r0"), failed(client, lost(leases._spec("r0")))
    leases._note_failures()
    assert leases._nobody_left is None
    leases._held["agent", "a1"] = leases._spec("a1"), failed(client, failure)
    leases._note_failures()
    assert str(leases._nobody_left) == str(failure)
    assert "nobody is left for `agent`, and the run ends" in caplog.messages


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
