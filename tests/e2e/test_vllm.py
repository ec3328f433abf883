"""A run on vLLM whose processes are killed: no session is lost, and no process is left."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sf_core.process.environment_variables import vllm_python
from tests.bench import chaos, stacks
from tests.bench.waits import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ON_VLLM: dict[str, dict[str, Any]] = {
    "engine": {"kind": "vllm", "script": None, "context_length": 256},
    # its CPU build knows no narrower heads
    "policy": {"hidden_size": 64, "num_layers": 1, "warmstart": None},
}


ALONE = """
cluster:
  workers:
    t0: {tags: [rollout, train]}
    a0: {tags: [agent]}
    c0: {tags: [cpu]}
"""
"""A stack whose trainer is the only worker that rolls out, so that its server rests while it trains."""


class Seeing:
    """Notes all processes of a worker's vLLM that there are before and after a fault."""

    def __init__(self, fault: chaos.faults.Fault, worker: str, seen: set[psutil.Process]) -> None:
        self.name = fault.name
        self._fault = fault
        self._worker = worker
        self._seen = seen

    def inject(self, run: chaos.training.Training, rng: random.Random) -> None:
        self._seen.update(chaos.faults.vllm_processes(run, self._worker))
        self._fault.inject(run, rng)
        self._seen.update(chaos.faults.vllm_processes(run, self._worker))


@dataclass(frozen=True)
class WhileTraining:
    """A fault that befalls a run in a train step."""

    fault: chaos.faults.Fault

    @property
    def name(self) -> str:
        return f"{self.fault.name} while it trains"

    def inject(self, run: chaos.training.Training, rng: random.Random) -> None:
        def trains() -> bool:
            run.go_on()
            done = stacks.invariants.manifests(run.config)
            return run.has_ended or any((k, "train") not in done for k, stage in done if stage == "filter")

        wait_until(trains, "a train step", quiet_s=chaos.training.RECOVERY_S, every_s=0.02)
        self.fault.inject(run, rng)


def survive(
    stack: stacks.standing.Stack, pipeline: str, worker: str, faults: list[chaos.faults.Fault], *options: str
) -> None:
    vllm_python()
    rng = random.Random(0)
    seen = set[psutil.Process]()
    rng.shuffle(faults)
    watched: list[chaos.faults.Fault] = [Seeing(fault, worker, seen) for fault in faults]
    try:
        started = stack.up(*options)
        assert started.returncode == 0, started.stdout + started.stderr
        settings: dict[str, Any] = {"iterations": 2 * len(faults) + 2, "overlap": pipeline == "async"}
        root = str(stack.folder / "runs")
        done = chaos.runner.run_through(
            chaos.training.runs(stack, root, pipeline=pipeline, **settings, **ON_VLLM), watched, rng
        )
    finally:
        stack.sf("down")
    assert [(injection.fault.name, injection.lost) for injection in done] == [(f.name, []) for f in faults]
    assert len(seen) > len(faults)
    wait_until(lambda: not [p for p in seen if p.is_running()], "vLLM's processes to end", every_s=0.2)


def test_a_run_on_vllm_loses_nothing_to_what_befalls_its_server(tmp_path: Path) -> None:
    faults: list[chaos.faults.Fault] = [
        chaos.faults.KillVllm("r0", "api_server"),
        chaos.faults.KillVllm("r0", "api_server", again_after_s=6.0),
        chaos.faults.KillVllm("r0", "VLLM::Worker"),
        chaos.faults.KillVllm("r0", "keeper"),
        chaos.faults.KillProcess("r0"),
        chaos.faults.Kill("worker-r0"),
    ]
    # the trainer is not lent: another server would be started for it
    survive(stacks.standing.Stack(tmp_path), "async", "r0", faults)


def test_a_run_loses_nothing_to_what_befalls_a_server_that_rests_while_its_worker_trains(
    tmp_path: Path,
) -> None:
    alone = tmp_path / "alone.yaml"
    alone.write_text(ALONE, encoding="utf-8")
    faults: list[chaos.faults.Fault] = [
        WhileTraining(chaos.faults.KillVllm("t0", "api_server")),
        WhileTraining(chaos.faults.KillVllm("t0", "VLLM::Worker")),
        WhileTraining(chaos.faults.KillProcess("t0")),
        chaos.faults.KillVllm("t0", "api_server"),
    ]
    survive(stacks.standing.Stack(tmp_path), "colocated", "t0", faults, str(alone))
