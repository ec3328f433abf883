"""`sf up` and `sf down` with all their real processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sf_core.config import RunConfig
from sf_core.process.child_processes import MARK
from sf_core.scheduling.cluster import read_workers
from tests import bench
from tests.bench.stacks import prefect_server
from tests.bench.stacks.standing import Stack


@pytest.fixture(scope="module")
def standing_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    (stack.user_code / "prefect.yaml").write_text("name: of-the-user\ndeployments: []\n", encoding="utf-8")
    try:
        started = stack.up()
        assert started.returncode == 0, started.stdout + started.stderr
        for port in (stack.ports.prefect, stack.ports.scheduler, stack.ports.dataplane):
            assert f"127.0.0.1:{port}" in started.stdout
        yield stack
    finally:
        stack.sf("down")


def test_every_part_is_up_and_the_runs_can_be_started(standing_stack: Stack) -> None:
    api = standing_stack.services.api
    prefect_server.PrefectApi(api).check_deployments()
    assert standing_stack.dataplane_answers()
    names = {worker.name for worker in read_workers(standing_stack.services.scheduler)}
    assert names == set(RunConfig().cluster.workers)

    def is_online() -> bool:
        with prefect_server.PrefectApi(api).client() as client:
            return bool(client.request("POST", "/work_pools/sf/workers/filter", json={}).json())

    bench.waits.wait_until(is_online, "a process worker", every_s=0.5)


# test_lost_runs.py has deployed runs that are lost
@pytest.mark.nightly
def test_a_deployed_run_of_the_users_package_goes_on_when_the_stack_was_down(
    standing_stack: Stack, tmp_path: Path
) -> None:
    gates = tmp_path / "gates"
    code = "import os\nfrom tests.e2e.held_package import agent, reward, tasks\n"
    (standing_stack.user_code / "my_agent.py").write_text(
        f"{code}os.environ['GATES'] = {str(gates)!r}\n", encoding="utf-8"
    )
    prefect = prefect_server.PrefectApi(standing_stack.services.api)
    environment = {part: f"my_agent:{part}" for part in ("tasks", "agent", "reward")}
    open_gates(gates, 0, 1)
    config = bench.stacks.cluster.small_run("deployed", tmp_path, environment=environment)
    run = prefect.create_run(prefect_server.DEPLOYMENTS["quickstart"], config.model_dump(mode="json"))
    bench.waits.wait_until(
        lambda: bench.stacks.cluster.is_committed(config, 0, "publish"), "an iteration", every_s=0.1
    )
    down = standing_stack.sf("down")
    ended = (
        "run deployed: AwaitingRetry, sf down stopped it; the next sf up continues it from where it stopped"
    )
    assert (down.returncode, ended in down.stdout) == (0, True), down.stdout + down.stderr
    assert standing_stack.processes() == []
    before = bench.stacks.invariants.manifests(config)
    open_gates(gates, 2, 3)
    assert standing_stack.up().returncode == 0
    assert prefect.await_state(run, "Completed", 150).run_count == 2
    last = "iteration 2, 3 of 3: reward "
    bench.waits.wait_until(
        lambda: any(line.startswith(last) for line in prefect.logs(run)), "its line", every_s=0.5
    )
    after = bench.stacks.invariants.manifests(config)
    assert (2, "publish") in after.keys() - before.keys()
    assert {key: after[key] for key in before} == before


# two flows on one run are in test_resume.py
@pytest.mark.nightly
def test_a_run_that_the_stack_has_open_is_not_continued_beside_it(
    standing_stack: Stack, tmp_path: Path
) -> None:
    """`sf resume` with a data plane of its own, while external agents go on at that of `sf up`."""
    gates = tmp_path / "gates"
    code = "import os\nfrom tests.e2e.held_package import agent, reward, tasks\n"
    (standing_stack.user_code / "beside.py").write_text(
        f"{code}os.environ['GATES'] = {str(gates)!r}\n", encoding="utf-8"
    )
    prefect = prefect_server.PrefectApi(standing_stack.services.api)
    environment = {part: f"beside:{part}" for part in ("tasks", "agent", "reward")}
    config = bench.stacks.cluster.small_run(
        "beside", tmp_path, environment=environment, train={"iterations": 2}
    )
    open_gates(gates, 0)
    run = prefect.create_run(prefect_server.DEPLOYMENTS["quickstart"], config.model_dump(mode="json"))
    bench.waits.wait_until(
        lambda: bench.stacks.cluster.is_committed(config, 0, "publish"), "an iteration", every_s=0.1
    )
    with bench.dataplane.outside.agents_at(standing_stack.services.dataplane, "beside") as agents:
        agents.await_more()
        resumed = subprocess.run(
            [sys.executable, "-m", "sf_core", "resume", config.run_dir],
            env=standing_stack.environment() | {"PREFECT_API_URL": standing_stack.services.api},
            cwd=standing_stack.user_code,
            capture_output=True,
            text=True,
            timeout=bench.waits.patience(280),
            encoding="utf-8",
        )
        told = resumed.stdout + resumed.stderr
        assert resumed.returncode == 1, told
        holder = f"process {standing_stack.pid('dataplane')} on "
        for part in ("run beside is open at another data plane", standing_stack.services.dataplane, holder):
            assert part in told
        agents.await_more()
    open_gates(gates, 1, 2, 3)
    prefect.await_state(run, "Completed", 150)
    assert {manifest["attempt"] for manifest in bench.stacks.invariants.manifests(config).values()} == {1}
    bench.dataplane.outside.await_stored(config.run_dir, agents.acknowledged)


def open_gates(folder: Path, *numbers: int) -> None:
    """Let the batches of these numbers begin, in the held package."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        (folder / str(number)).touch()


@pytest.mark.nightly
def test_a_run_goes_on_when_the_machine_of_its_stack_was_reset(standing_stack: Stack, tmp_path: Path) -> None:
    prefect = prefect_server.PrefectApi(standing_stack.services.api)
    config = bench.stacks.cluster.small_run("reset", tmp_path, train={"iterations": 30})
    run = prefect.create_run(prefect_server.DEPLOYMENTS["train"], config.model_dump(mode="json"))
    bench.waits.wait_until(
        lambda: bench.stacks.cluster.is_committed(config, 0, "publish"), "an iteration", every_s=0.1
    )
    while left := standing_stack.processes():
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    started = standing_stack.up()
    lost = "run reset: AwaitingRetry, its process is gone; the run is restarted from where it stopped"
    assert (started.returncode, lost in started.stdout) == (0, True), started.stdout + started.stderr
    assert prefect.await_state(run, "Completed", 180).run_count == 2
    log = (standing_stack.folder / "logs" / "prefect-worker.log").read_text(encoding="utf-8")
    assert "Runner failed to retrieve flow" not in log


def short_faults(rng: random.Random) -> list[bench.chaos.faults.Fault]:
    faults: list[bench.chaos.faults.Fault] = [
        *(
            bench.chaos.faults.Kill("dataplane"),
            bench.chaos.faults.KillProcess("r0"),
            bench.chaos.faults.KillProcess("t0"),
            bench.chaos.faults.Kill("flow"),
        ),
        bench.chaos.faults.Stop(("dataplane",), 2.0),
    ]
    rng.shuffle(faults)
    return faults


@pytest.mark.nightly  # most of what may befall it, in test_resume.py too
def test_a_run_loses_nothing_to_what_befalls_the_stack(standing_stack: Stack, tmp_path: Path) -> None:
    rng = random.Random(0)
    faults = short_faults(rng)
    done = bench.chaos.runner.run_through(
        bench.chaos.training.runs(standing_stack, str(tmp_path), iterations=8), faults, rng
    )
    assert [(injection.fault, injection.lost) for injection in done] == [(fault, []) for fault in faults]


@pytest.mark.nightly
def test_without_overlap_the_weights_are_those_of_an_undisturbed_run(
    standing_stack: Stack, tmp_path: Path
) -> None:
    rng = random.Random(0)
    trainings = bench.chaos.training.runs(standing_stack, str(tmp_path), iterations=8, overlap=False)
    undisturbed = bench.chaos.runner.run_undisturbed(next(trainings))
    bench.chaos.runner.run_through(trainings, short_faults(rng), rng, undisturbed=undisturbed)


@pytest.mark.nightly
def test_a_run_whose_scheduler_died_goes_on_with_one_more_command(
    standing_stack: Stack, tmp_path: Path
) -> None:
    run = next(bench.chaos.training.runs(standing_stack, str(tmp_path), iterations=6))
    [injection] = bench.chaos.runner.run_through(
        iter([run]), [bench.chaos.faults.Kill("dask-scheduler")], random.Random(0)
    )
    assert (run.starts, injection.lost) == (2, [])


def test_a_stack_is_not_started_twice(standing_stack: Stack) -> None:
    again = standing_stack.up()
    assert (again.returncode, "a stack already runs in" in again.stderr) == (2, True)


def test_down_ends_exactly_this_stack(standing_stack: Stack) -> None:
    # a worker that was killed leaves what it started
    psutil.Process(standing_stack.pid("worker-c0")).kill()
    assert len(standing_stack.processes()) > 8
    with subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: "/another"}) as stranger:
        down = standing_stack.sf("down")
        assert down.returncode == 0, down.stderr
        assert standing_stack.processes() == []
        assert stranger.poll() is None
        stranger.kill()
    assert "no stack runs" in standing_stack.sf("down").stdout
