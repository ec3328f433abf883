"""Prefect servers with our deployments, and one of them with a fresh clone to deploy from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Pending, Running

from sf_core.cli.stack.local import local_stack, start_prefect_server
from sf_core.cli.stack.processes import prefect_worker
from sf_core.cli.stack.supervisor import Process, Supervisor
from sf_core.config import RunConfig
from sf_core.process.child_processes import FLOW_RUN
from tests.bench import ROOT
from tests.bench.waits import patience, wait_until

DEPLOYMENTS = {
    "quickstart": "train/quickstart",
    "train": "train/train",
    "warmstart": "warmstart/warmstart",
    "evaluate": "evaluate/evaluate",
}
LOOKS_OFTEN = {"PREFECT_WORKER_QUERY_SECONDS": "1"}
"""Poll interval of a process worker, which is 10 s by default."""


def without_addresses(config: RunConfig) -> RunConfig:
    """The configuration as filled in a form, with the worker's scheduler and data plane."""
    cluster = config.cluster.model_copy(update={"scheduler": None})
    dataplane = config.dataplane.model_copy(update={"url": None})
    return config.model_copy(update={"cluster": cluster, "dataplane": dataplane})


@dataclass
class PrefectApi:
    """Client of the Prefect server at this URL."""

    api: str

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        with temporary_settings({PREFECT_API_URL: self.api}), get_client(sync_client=True) as client:
            yield client

    def check_deployments(self) -> None:
        """Check that every deployment exists with its form, in a pool for one run."""
        with self.client() as client:
            assert client.read_work_pool("sf").concurrency_limit == 1
            assert len(client.read_automations()) == 2
            for name, full_name in DEPLOYMENTS.items():
                deployment = client.read_deployment_by_name(full_name)
                assert (deployment.work_pool_name, deployment.tags) == ("sf", ["seamlessflow"])
                assert deployment.description and deployment.enforce_parameter_schema
                assert list(deployment.parameter_openapi_schema["properties"]) == ["config"]
                assert "config" in deployment.parameters, name

    def create_run(self, deployment: str, config: dict[str, Any]) -> FlowRun:
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(found.id, parameters={"config": config})

    def logs(self, run: FlowRun, level: int | None = None) -> list[str]:
        """The messages of the run, of this level if one is given."""
        with self.client() as client:
            found = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
        return [log.message for log in found if level in (None, log.level)]

    def states(self, run: FlowRun) -> list[str]:
        """Names of the states that the run has had."""
        with self.client() as client:
            return [str(state.name) for state in client.read_flow_run_states(run.id)]

    def crash(self, run: FlowRun) -> None:
        """Report a run as a worker does whose process for it has crashed."""
        with self.client() as client:
            for state in (Pending(), Running(), Crashed()):
                client.set_flow_run_state(run.id, state, force=True)

    def await_state(
        self, run: FlowRun, name: str, quiet_s: float = 180, worker: Process | None = None
    ) -> FlowRun:
        def now() -> FlowRun | None:
            with self.client() as client:
                seen = client.read_flow_run(run.id)
            assert seen.state
            if name == "Completed" and seen.state.is_failed():
                raise AssertionError(f"{seen.state} {worker.tail(30) if worker else ''}")
            return seen if seen.state.name == name else None

        found: FlowRun = wait_until(now, f"{run.name} to be {name}", quiet_s=quiet_s, every_s=0.5)
        return found


@dataclass
class Server(PrefectApi):
    """A Prefect server in its own process, and a clone whose code it deploys."""

    clone: Path
    stack: Supervisor

    @property
    def env(self) -> dict[str, str]:
        return {**self.stack.env, "PREFECT_API_URL": self.api}

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a module in the clone, against this server."""
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.clone,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=patience(),
            encoding="utf-8",
        )

    def deploy(self) -> None:
        for command in (["sf_core", "setup-server"], ["prefect", "--no-prompt", "deploy", "--all"]):
            done = self.call(*command)
            assert done.returncode == 0, done.stdout + done.stderr

    @contextmanager
    def execute(self, run: FlowRun, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A process that executes the run, like those of a process worker."""
        command = [sys.executable, "-m", "prefect.engine", str(run.id)]
        env = {**self.env, FLOW_RUN: str(run.id)}
        with (
            log.open("wb") as output,
            subprocess.Popen(command, cwd=self.clone, env=env, stdout=output, stderr=output) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def worker(self) -> Iterator[Process]:
        """A process worker that takes runs of the pool."""
        env = {"PREFECT_API_URL": self.api, **LOOKS_OFTEN}
        [worker] = self.stack.start(replace(prefect_worker("sf"), env=env))
        yield worker
        self.stack.remove(worker)

    def await_heartbeat(self, name: str) -> FlowRun:
        """The run of this name, once the server has received its heartbeat."""

        def heard() -> FlowRun | None:
            with self.client() as client:
                runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": [name]}))
                wanted = {"event": {"name": ["prefect.flow-run.heartbeat"]}}
                events = client.request("POST", "/events/filter", json={"filter": wanted}).json()["events"]
            ids = {event["resource"]["prefect.resource.id"] for event in events}
            return runs[0] if runs and f"prefect.flow-run.{runs[0].id}" in ids else None

        found: FlowRun = wait_until(heard, f"a heartbeat of {name}", every_s=0.5)
        return found


@contextmanager
def prefect_server(folder: Path, env: dict[str, str]) -> Iterator[Server]:
    clone = folder / "clone"
    _copy_tracked(clone)
    paths = os.pathsep.join(filter(None, [str(clone), env.get("PYTHONPATH")]))
    places = {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": paths, "SF_HOME": str(clone)}
    with local_stack(folder / "logs", env | places) as stack:
        yield Server(start_prefect_server(stack, for_deployments=True)(), clone, stack)


def _copy_tracked(folder: Path) -> None:
    """Copy the files that a clone of this working tree would have."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, encoding="utf-8"
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target, follow_symlinks=False)
