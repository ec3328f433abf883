"""Runs lost by a Prefect server are found, resumed where they stopped, and finally given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.states import Cancelling, Crashed, Pending, Running

from sf_core.cli.stack.processes import Part
from sf_core.process.child_processes import FLOW_RUN
from tests.bench import stacks, waits
from tests.bench.stacks import prefect_server

HOOKS = "hook"
"""Argument of a worker's process that runs the hooks of a flow that has crashed."""


# what is crashed and what is told: tests/tasks/test_lost_runs.py, tests/sf_core/reports/test_log_lines.py
@pytest.mark.nightly
def test_a_killed_run_is_started_again_once_where_it_stopped_although_its_crash_is_reported_twice(
    server: prefect_server.Server, cluster: stacks.cluster.Cluster
) -> None:
    config = prefect_server.without_addresses(cluster.config("killed", train={"iterations": 20}))

    def hooks() -> psutil.Process | None:
        """The process between the two reports of a worker."""
        for child in psutil.Process(worker.pid()).children():
            with suppress(psutil.Error):
                if HOOKS in child.cmdline():
                    return child
        return None

    with server.worker() as worker:
        run = server.create_run(prefect_server.DEPLOYMENTS["quickstart"], config.model_dump(mode="json"))
        waits.wait_until(
            lambda: stacks.cluster.is_committed(config, 0, "publish"), "an iteration", every_s=0.1
        )
        for process in psutil.Process(worker.pid()).children(recursive=True):
            process.kill()
        before = stacks.invariants.manifests(config)
        between = waits.wait_until(hooks, "the first report", every_s=0.05)
        between.suspend()
        try:
            waits.wait_until(lambda: Path(config.run_dir, "attempts", "00002").exists(), "another attempt")
        finally:
            between.resume()
        between.wait(waits.patience())
        assert not stacks.cluster.is_committed(config, 19, "publish")
        ended = server.await_state(run, "Completed", 200, worker)
    assert (ended.name, ended.run_count, server.states(run).count("Crashed")) == ("killed", 2, 1)
    after = stacks.invariants.manifests(config)
    assert (19, "publish") in after
    assert {key: after[key] for key in before} == before
    with server.client() as client:
        mine = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [run.id]}})
        parts = [part.state_name for part in client.read_flow_runs(flow_run_filter=mine)]
    assert set(parts) <= {"Completed", "Crashed"} and parts.count("Crashed") <= 1
    lines = server.logs(ended)
    assert len([line for line in lines if line.startswith("attempt 2 continues with iteration ")]) == 1
    for number in range(20):
        assert len([line for line in lines if line.startswith(f"iteration {number}, ")]) == 1


@pytest.mark.parametrize(("pool", "state"), [("process", "Running"), ("kubernetes", "Crashed")])
def test_a_crash_is_reported_once_by_a_worker_of_any_type(
    server: prefect_server.Server, pool: str, state: str
) -> None:
    """The second report of a process worker is the only one of others."""
    with server.client() as client:
        client.create_work_pool(WorkPoolCreate(name=f"a-{pool}", type=pool), overwrite=True)
        flow = client.create_flow_from_name("crashes")
        deployment = client.create_deployment(
            flow, f"in-{pool}", work_pool_name=f"a-{pool}", tags=["seamlessflow"]
        )
        run = client.create_flow_run_from_deployment(deployment)
        message = "Flow run infrastructure exited with non-zero status code -9."
        for proposed in (Pending(), Running(), Crashed(message=message)):
            client.set_flow_run_state(run.id, proposed)
    assert server.states(run)[-1] == state


# two flows on one run are in test_resume.py
@pytest.mark.nightly
def test_a_process_whose_flow_run_was_taken_over_ends_without_a_state(
    server: prefect_server.Server, cluster: stacks.cluster.Cluster, tmp_path: Path
) -> None:
    config = prefect_server.without_addresses(cluster.config("taken-over", train={"iterations": 8}))
    run = server.create_run(prefect_server.DEPLOYMENTS["train"], config.model_dump(mode="json"))
    logs = tmp_path / "older", tmp_path / "newer"
    with server.execute(run, logs[0]) as older:
        waits.wait_until(
            lambda: stacks.cluster.is_committed(config, 0, "publish") or older.poll() is not None,
            "an iteration",
        )
        older.send_signal(signal.SIGSTOP)
        with server.execute(run, logs[1]) as newer:
            waits.wait_until(lambda: Path(config.run_dir, "attempts", "00002").exists(), "another attempt")
            older.send_signal(signal.SIGCONT)
            status = older.wait(waits.patience())
            assert newer.wait(waits.patience()) == 0, logs[1].read_text(encoding="utf-8")[-3000:]
    said = logs[0].read_text(encoding="utf-8")[-3000:]
    assert server.states(run)[-3:] == ["Running", "Running", "Completed"], said
    assert (status, said.count("start 2 of this flow run has taken over")) == (0, 1), said


@pytest.mark.nightly
def test_a_run_that_crashes_again_and_again_is_given_up(server: prefect_server.Server) -> None:
    run = server.create_run(prefect_server.DEPLOYMENTS["train"], {"run_id": "hopeless"})
    for _ in range(2):
        server.crash(run)
        server.await_state(run, "AwaitingRetry", 90)
    server.crash(run)
    # the server takes events one after the other: once this one is retried, the other would have been
    other = server.create_run(prefect_server.DEPLOYMENTS["train"], {"run_id": "first-crash"})
    server.crash(other)
    server.await_state(other, "AwaitingRetry", 90)
    assert server.await_state(run, "Crashed").run_count == 3
    with server.client() as client:
        client.delete_flow_run(other.id)  # or a worker would start it


def test_a_run_whose_process_vanished_is_found(server: prefect_server.Server) -> None:
    def setup(silence_s: int) -> None:
        done = server.call("sf_core", "setup-server", "--silence-s", str(silence_s))
        assert done.returncode == 0, done.stderr

    setup(10)
    with server.client() as client:
        before = client.read_automations()
    command = [sys.executable, "-m", "tests.e2e.sleeping_flow"]
    [process] = server.stack.start(Part("vanishing", command, {"PREFECT_API_URL": server.api}, once=True))
    run = server.await_heartbeat("asleep")
    psutil.Process(process.pid()).kill()
    # as a stack does that begins again
    setup(10)
    with server.client() as client:
        assert client.read_automations() == before
    crashed = server.await_state(run, "Crashed", 90)
    setup(540)
    assert crashed.state and crashed.state.message == "no heartbeat for 10 s: its process is gone"


def test_a_stack_that_begins_again_frees_the_places_of_runs_that_nobody_works_on(
    server: prefect_server.Server,
) -> None:
    config = {"run_id": "lost"}
    runs = [server.create_run(prefect_server.DEPLOYMENTS["train"], config) for _ in range(5)]
    waiting, running, often, cancelled, alive = runs
    with server.client() as client:
        client.set_flow_run_state(waiting.id, Pending(), force=True)
        for run in (running, often, often, often, cancelled, alive):
            client.set_flow_run_state(run.id, Pending(), force=True)
            client.set_flow_run_state(run.id, Running(), force=True)
        client.set_flow_run_state(cancelled.id, Cancelling(), force=True)
    with subprocess.Popen(["sleep", "60"], env=os.environ | {FLOW_RUN: str(alive.id)}) as process:
        done = server.call("tasks.lost_runs", "up", "sf", "2")
        process.kill()
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {
        f"run {waiting.name}: AwaitingRetry, its process is gone; the run is restarted from where it stopped",
        f"run {running.name}: AwaitingRetry, its process is gone; the run is restarted from where it stopped",
        f"run {often.name}: Crashed, its process is gone, and it was started 3 times",
        f"run {cancelled.name}: Cancelled, its process is gone",
    }
    assert server.await_state(alive, "Running").run_count == 1
    with server.client() as client:
        for run in runs:
            client.delete_flow_run(run.id)  # or a worker would start it
