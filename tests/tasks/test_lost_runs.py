"""What a killed flow has left in Prefect, with a server in this process. tests/e2e/test_lost_runs.py kills
flows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.server.api.server import create_app
from prefect.states import Completed, Running, State
from starlette.testclient import TestClient

from tasks.lost_runs import crash_cut_parts
from tasks.prefect_server import RepeatRefused

TOLD = "its process ended; start 2 of run killed continues from there"


@flow(name="train")
def a_flow() -> None: ...


@task(name="train")
def a_task() -> None: ...


class InThisProcess(httpx.BaseTransport):
    """Delivers the requests of a client to an application in this process."""

    def __init__(self, http: TestClient) -> None:
        self._http = http

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._http.request(
            request.method, str(request.url), content=request.read(), headers=request.headers
        )
        return httpx.Response(answer.status_code, content=answer.content)


@pytest.fixture
def client(database: Path) -> Iterator[SyncPrefectClient]:
    app = create_app(ephemeral=True, ignore_cache=True)
    # SQLite refuses one of two simultaneous writers, and services of the server write too
    app.add_middleware(RepeatRefused)
    with TestClient(app) as http:
        transport = InThisProcess(http)
        with SyncPrefectClient("http://server/api", httpx_settings={"transport": transport}) as client:
            yield client


def told(state: State[Any] | None) -> tuple[str | None, str | None]:
    assert state is not None
    return state.name, state.message


def test_what_a_killed_flow_has_left_is_crashed_when_the_flow_starts_again(client: SyncPrefectClient) -> None:
    run = client.create_flow_run(a_flow, name="killed", state=Running())
    client.set_flow_run_state(run.id, Running(), force=True)

    def begin(number: int, state: State[None]) -> tuple[FlowRun, TaskRun, TaskRun]:
        """A subflow, a task of it, and the task run that stands for the subflow."""
        stands_for_it = client.create_task_run(a_task, run.id, f"{number}", state=Running())
        part = client.create_flow_run(a_flow, parent_task_run_id=stands_for_it.id, state=Running())
        inner = client.create_task_run(a_task, part.id, "0", state=state)
        client.set_flow_run_state(part.id, state, force=True)
        return part, inner, stands_for_it

    done, *tasks_done = begin(0, Completed())
    cut, *tasks_cut = begin(1, Running())
    lease = client.create_task_run(a_task, run.id, "lease", state=Running())
    other = client.create_flow_run(a_flow, state=Running())
    stands_for_own = client.create_task_run(a_task, run.id, "2", state=Running())
    own_process = client.create_flow_run_from_deployment(
        client.create_deployment(run.flow_id, "deployed"),
        parent_task_run_id=stands_for_own.id,
        state=Running(),
    )
    crash_cut_parts(client, client.read_flow_run(run.id))

    flows = [told(client.read_flow_run(part.id).state) for part in (run, other, own_process, done, cut)]
    assert flows == [("Running", None)] * 3 + [("Completed", None), ("Crashed", TOLD)]
    tasks = [
        told(client.read_task_run(part.id).state) for part in (stands_for_own, *tasks_done, *tasks_cut, lease)
    ]
    assert tasks == [("Running", None)] + [("Completed", None)] * 2 + [("Crashed", TOLD)] * 3
