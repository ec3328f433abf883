"""`sf up` and `sf down` with all their real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from sf_core.config import RunConfig
from sf_core.local_stack import free_port
from sf_core.scheduling.plan import read_workers
from sf_core.standing_stack import MARK, server
from tests.e2e.conftest import manifests, small_run
from tests.e2e.prefect_server import DEPLOYMENTS, PrefectApi
from tests.e2e.quickstart import ROOT
from tests.e2e.waiting import wait_until

pytestmark = pytest.mark.slow


@dataclass
class Stack:
    folder: Path
    ports: dict[str, int]

    def sf(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }
        return subprocess.run(
            [sys.executable, "-m", "sf_core", command, "--folder", str(self.folder), *options],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
        )

    def up(self) -> subprocess.CompletedProcess[str]:
        return self.sf(
            "up", *(text for name, port in self.ports.items() for text in (f"--{name}-port", str(port)))
        )

    def pid(self, part: str) -> int:
        """0 while it is not running."""
        return int(server(self.folder).supervisor.getProcessInfo(part)["pid"])  # type: ignore[index, call-overload, arg-type]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def dataplane_answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports['dataplane']}/metrics", timeout=2).is_success
        except httpx.HTTPError:
            return False


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(
        tmp_path_factory.mktemp("stack"),
        {name: free_port() for name in ("prefect", "scheduler", "dataplane")},
    )
    try:
        started = stack.up()
        assert started.returncode == 0, started.stdout + started.stderr
        for port in stack.ports.values():
            assert f"127.0.0.1:{port}" in started.stdout
        yield stack
    finally:
        stack.sf("down")


def test_every_part_is_up_and_the_runs_can_be_started(stack: Stack) -> None:
    api = f"http://127.0.0.1:{stack.ports['prefect']}/api"
    PrefectApi(api).check_deployments()
    assert stack.dataplane_answers()
    names = {worker.name for worker in read_workers(f"tcp://127.0.0.1:{stack.ports['scheduler']}")}
    assert names == set(RunConfig().cluster.workers)
    online = f"{api}/work_pools/sf/workers/filter"
    wait_until(lambda: httpx.post(online, json={}).json(), "a process worker", every_s=0.5)


def test_a_deployed_run_is_taken_by_its_worker_and_completes(stack: Stack, tmp_path: Path) -> None:
    prefect = PrefectApi(f"http://127.0.0.1:{stack.ports['prefect']}/api")
    config = small_run("deployed", tmp_path)
    run = prefect.create_run(DEPLOYMENTS["quickstart"], config.model_dump(mode="json"))
    assert prefect.await_state(run, "Completed", 150).name == "deployed"
    assert (2, "publish") in manifests(config)


def test_a_part_that_is_killed_comes_back(stack: Stack) -> None:
    pid = stack.pid("dataplane")
    psutil.Process(pid).kill()
    wait_until(lambda: stack.pid("dataplane") not in (0, pid), "another data plane", every_s=0.1)
    wait_until(stack.dataplane_answers, "the data plane to answer", every_s=0.1)


def test_a_stack_is_not_started_twice(stack: Stack) -> None:
    again = stack.up()
    assert (again.returncode, "is up already" in again.stderr) == (2, True)


def test_down_ends_exactly_this_stack(stack: Stack) -> None:
    # a worker that was killed leaves what it started
    psutil.Process(stack.pid("worker-c0")).kill()
    assert len(stack.processes()) > 8
    with subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: "/another"}) as stranger:
        down = stack.sf("down")
        assert down.returncode == 0, down.stderr
        assert stack.processes() == []
        assert stranger.poll() is None
        stranger.kill()
    assert "no stack is up" in stack.sf("down").stdout
