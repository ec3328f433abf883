"""Sets the state of flow runs that lost their process when a stack ended, and of what a killed flow has left.

`python -m tasks.lost_runs up POOL RETRIES` is called before a process worker of the pool starts, `... down
RUN...` after the worker of these runs has ended. The server is the stack's own, with all processes on this
machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Cancelled, Crashed, State

from sf_core.process.child_processes import FLOW_RUN, find_carriers

CLAIMS = ["PENDING", "RUNNING", "CANCELLING"]
"""Types of the states in which a flow run takes a place in its pool."""


def find_lost(client: SyncPrefectClient, pool: str) -> list[FlowRun]:
    """Flow runs of the pool whose state claims a process while no process of this machine works on them."""
    claiming = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": CLAIMS}}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
    )
    at_work = {run for _, run in find_carriers(FLOW_RUN)}
    return [run for run in claiming if str(run.id) not in at_work]


def take_back(client: SyncPrefectClient, pool: str, retries: int) -> list[str]:
    """Have lost runs restarted, except those restarted `retries` times already; returns a line about each.

    The automation for crashed runs cannot do this: a restarted server takes an event only after the one
    before it, and gives up waiting for one that it has not seen itself after 15 minutes."""
    return [_move(client, run, _once_lost(run, retries)) for run in find_lost(client, pool)]


def hand_over(client: SyncPrefectClient, runs: Iterable[UUID]) -> list[str]:
    """Leave flow runs that ended with their stack to the next stack; returns a line about each."""
    lines = []
    for run in map(client.read_flow_run, runs):
        assert run.state
        if run.parent_task_run_id is not None:
            # its parent starts another one instead (tasks/sweeping.py)
            continue
        if run.state.type in CLAIMS or run.state.is_crashed():
            lines.append(_move(client, run, _once_ended(run)))
        else:
            lines.append(f"run {run.name}: {run.state.name}")
    return lines


def crash_cut_parts(client: SyncPrefectClient, run: FlowRun) -> None:
    """Set to Crashed the subflows and tasks that an earlier process of this flow run has left unfinished.
    Only their own process would set their states."""
    state: State[Any] = Crashed(
        message=f"its process ended; start {run.run_count} of run {run.name} continues from there"
    )
    is_cut = {"state": {"type": {"any_": CLAIMS}}}
    children = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(is_cut | {"parent_flow_run_id": {"any_": [run.id]}})
    )
    # a run of a deployment has a process of its own, which may be alive
    flows = [child for child in children if child.deployment_id is None]
    alive = {child.parent_task_run_id for child in children if child.deployment_id is not None}
    for part in flows:
        # Prefect changes the task run that stands for the subflow with it
        client.set_flow_run_state(part.id, state, force=True)
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate(
            {"id": {"any_": [run.id, *(part.id for part in flows)]}}
        ),
        task_run_filter=TaskRunFilter.model_validate(is_cut),
    )
    for task in tasks:
        if task.id not in alive:
            client.set_task_run_state(task.id, state, force=True)


def _once_lost(run: FlowRun, retries: int) -> State:
    assert run.state
    if run.state.is_cancelling():
        return Cancelled(message="its process is gone")
    if run.run_count > retries:
        return Crashed(message=f"its process is gone, and it was started {run.run_count} times")
    return AwaitingRetry(message="its process is gone; the run is restarted from where it stopped")


def _once_ended(run: FlowRun) -> State:
    assert run.state
    if run.state.is_cancelling():
        return Cancelled(message="its process was ended")
    return AwaitingRetry(message="sf down stopped it; the next sf up continues it from where it stopped")


def _move(client: SyncPrefectClient, run: FlowRun, state: State) -> str:
    client.set_flow_run_state(run.id, state, force=True)
    return f"run {run.name}: {state.name}, {state.message}"


def main(when: str, *arguments: str) -> None:
    with get_client(sync_client=True) as client:
        if when == "up":
            pool, retries = arguments
            lines = take_back(client, pool, int(retries))
        else:
            lines = hand_over(client, map(UUID, arguments))
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
