from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sf_core.cli.stack.elastic_workers import LocalRunners
from sf_core.cli.stack.local import local_stack, start_dask
from sf_core.cli.stack.supervisor import Supervisor
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.scheduling.cluster import read_workers
from tests.e2e.conftest import ROOT
from tests.patience import wait_until

pytestmark = pytest.mark.system


@pytest.fixture
def emulated_stack(tmp_path: Path) -> Iterator[Supervisor]:
    with local_stack(tmp_path / "logs", {"PYTHONPATH": str(ROOT), "SF_EMULATED": "1"}) as stack:
        yield stack


def config() -> RunConfig:
    elastic = {"agent": {"min": 1, "max": 3, "idle_s": 1e-6}}
    return validate_config({"rollout": {"concurrency": 10}, "cluster": {"elastic": elastic}})


def status(sessions: int, *runners: str) -> dict[str, Any]:
    return {"work": {"agent": sessions, "reward": 0}, "runners": {name: {} for name in runners}}


def test_worker_processes_come_with_the_queue_and_go_when_they_hold_no_lease(
    emulated_stack: Supervisor, tmp_path: Path
) -> None:
    scheduler = start_dask(emulated_stack, {}, tmp_path)()
    runners = LocalRunners(emulated_stack, config(), scheduler, tmp_path)
    runners.adapt(status(10))
    assert list(emulated_stack.processes) == ["dask-scheduler"]
    runners.adapt(status(15))
    [joined] = wait_until(lambda: read_workers(scheduler), "a worker", every_s=0.2)
    assert (joined.name, joined.tags) == ("a0-01", {"agent"})
    runners.adapt(status(0, "a0:a0-0.1", "a0-01:a0-01-1.1"))
    assert len(emulated_stack.processes) == 2, "it still works"
    runners.adapt(status(0, "a0:a0-0.1"))
    assert list(emulated_stack.processes) == ["dask-scheduler"]
