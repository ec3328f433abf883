"""A stack of real processes, and small runs on it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
from distributed import Client

from sf_core.cli.stack.local import Services, local_stack, start_services
from sf_core.cli.stack.supervisor import Supervisor
from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.validation import validate_config
from sf_core.scheduling.timeline import Span, read_spans
from storage.run_directory import STAGES, RunDirectory
from tests.bench import ROOT
from tests.bench.stacks.nannies import worker_of
from tests.bench.stacks.prefect_home import make_prefect_home
from tests.bench.waits import patience, wait_until

SMALL_RUN: dict[str, Any] = {
    "policy": {"hidden_size": 32, "num_layers": 1, "warmstart": None},
    "environment": {part: f"tests.bench.stacks.echo_package:{part}" for part in ("tasks", "agent", "reward")},
    "rollout": {"group_size": 2, "groups_per_batch": 3, "max_tokens": 8, "concurrency": 8},
    "train": {"iterations": 3},
    "evaluate": {"every": 2, "num_tasks": 4},
    "engine": {"kind": "scripted", "script": "tests.bench.stacks.echo_package:script", "max_running": 16},
}
"""A few small iterations on the scripted engine."""


def small_run(
    run_id: str, root: Path | str, pipeline: str | None = None, **sections: dict[str, Any]
) -> RunConfig:
    """SMALL_RUN below `root`, with its sections updated; only `policy` is replaced as a whole."""
    data = SMALL_RUN | {"run_id": run_id, "pipeline": pipeline, "storage": {"root": str(root)}}
    for name, values in sections.items():
        data[name] = values if name == "policy" else data.get(name, {}) | values
    return validate_config(data)


@dataclass
class Cluster:
    stack: Supervisor
    folder: Path
    services: Services
    prefix: tuple[str, ...] = ()
    """Words in front of the command of a flow."""
    _flows: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Flows that the current test has started."""

    @property
    def user_code(self) -> Path:
        """A folder outside the repository that all processes can import from."""
        return self.folder / "user"

    def config(self, run_id: str, pipeline: str | None = None, **sections: dict[str, Any]) -> RunConfig:
        """A small run on this cluster."""
        addresses = {"scheduler": self.services.scheduler}
        sections["cluster"] = addresses | sections.get("cluster", {})
        sections["dataplane"] = {"url": self.services.dataplane}
        return small_run(run_id, self.folder / "runs", pipeline, **sections)

    def start(self, config: RunConfig, flow: str = "train", **env: str) -> subprocess.Popen[bytes]:
        file = self.folder / f"{config.run_id}.json"
        file.write_text(config.model_dump_json(), encoding="utf-8")
        log = open(self.folder / f"{config.run_id}.log", "ab")  # noqa: SIM115
        process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", f"flows.{flow}", str(file)],
            env={**self.stack.env, "PREFECT_API_URL": self.services.api, **env},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        self._flows.append(process)
        return process

    def end_flows(self) -> None:
        """End the flows that a failed test has left: they hold the workers that the next test needs."""
        left = [flow for flow in self._flows if flow.poll() is None]
        self._flows.clear()
        for flow in left:
            flow.send_signal(signal.SIGCONT)
            flow.send_signal(signal.SIGINT)
            try:
                flow.wait(patience(60))
            except subprocess.TimeoutExpired:
                flow.kill()
                flow.wait()

    def log(self, config: RunConfig) -> str:
        return (self.folder / f"{config.run_id}.log").read_text(encoding="utf-8")

    def finish(self, config: RunConfig, process: subprocess.Popen[bytes]) -> None:
        try:
            assert process.wait(patience()) == 0, self.log(config)[-3000:]
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(self.log(config)[-3000:]) from None

    def restart_dataplane(self) -> None:
        """kill -9 of the data plane; its supervisor starts another one at the same address."""
        process = self.stack.processes["dataplane"]
        pid = process.pid()
        psutil.Process(pid).kill()
        wait_until(lambda: process.pid() not in (0, pid), "another data plane", every_s=0.1)

    def running_tasks(self) -> set[str]:
        """Keys of the tasks on all workers, including those that Dask has given up."""
        with Client(self.services.scheduler, set_as_default=False) as client:
            active = client.run(lambda dask_worker: list(dask_worker.active_threads.values()))
            return {key for keys in (*active.values(), *client.processing().values()) for key in keys}

    def worker_process(self, name: str) -> psutil.Process:
        """The process that runs the worker's tasks; its nanny starts another one when it dies."""
        nanny = self.stack.processes[f"worker-{name}"]
        process = wait_until(lambda: worker_of(nanny.pid()), f"a process of worker {name}", every_s=0.02)
        assert isinstance(process, psutil.Process)
        return process


def overlap_s(some: Iterable[Span], others: Iterable[Span]) -> float:
    """Longest overlap of a span of `some` with one of `others`, in seconds; negative without any."""
    return max(min(a.end, b.end) - max(a.start, b.start) for a, b in product(some, others))


def spans(config: RunConfig, tag: str, kind: str = "busy", on: str | None = None) -> list[Span]:
    """Spans of this tag and kind on all devices of a run, or on one worker's."""
    found = read_spans(RunDirectory(config.run_dir))
    return [span for span in found if (span.tag, span.kind) == (tag, kind) and on in (None, span.worker)]


def holders(config: RunConfig, tag: str) -> set[str]:
    """The workers that were ever held under this tag."""
    return {span.worker for span in spans(config, tag, "held")}


def is_committed(config: RunConfig, iteration: int, stage: str) -> bool:
    """Whether a stage is committed; cheap enough to poll during a run."""
    return Path(config.run_dir, "manifests", f"{iteration:05d}", f"{stage}.json").exists()


@contextmanager
def running_cluster(folder: Path, cache: Path, workers: Mapping[str, WorkerConfig]) -> Iterator[Cluster]:
    (folder / "user").mkdir()
    env = {
        "PREFECT_HOME": make_prefect_home(folder / "prefect"),
        "PYTHONPATH": f"{ROOT}:{folder / 'user'}",
        "SF_CACHE_DIR": str(cache),
    }
    # the operator's key is there, also for the commands and flows that this process starts
    with pytest.MonkeyPatch.context() as patch, local_stack(folder / "logs", env) as stack:
        patch.setenv("SF_CACHE_DIR", str(cache))
        yield Cluster(stack, folder, start_services(stack, folder, workers)())


def await_stage(cluster: Cluster, config: RunConfig, flow: Popen[bytes], iteration: int, stage: str) -> None:
    """Return when this stage of an iteration begins: when the one before it is committed."""
    before = STAGES.index(stage) - 1
    committed = (iteration if before >= 0 else iteration - 1, STAGES[before])
    what = f"start of {stage} of iteration {iteration}"
    wait_until(lambda: is_committed(config, *committed) or flow.poll() is not None, what)
    assert flow.poll() is None, cluster.log(config)[-2000:]
