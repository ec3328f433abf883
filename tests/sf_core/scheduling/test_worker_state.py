"""What a worker keeps, with Dask in this process."""

from __future__ import annotations

import pytest
from distributed import Client, LocalCluster

from sf_core.config import RunConfig
from sf_core.engines.scripted import ScriptedEngine
from sf_core.scheduling.worker_state import PLUGIN, WorkerState, current_epoch, current_worker
from tests.bench.waits import patience

SCRIPTED = {"engine": {"kind": "scripted", "script": "tests.bench.stacks.echo_package:script"}}


def lend_engine() -> tuple[str, bool, int]:
    worker = current_worker()
    with worker.engine.lend(RunConfig.model_validate(SCRIPTED), "start") as (_, is_new):
        return worker.name, is_new, current_epoch()


def test_a_worker_keeps_its_engine_from_task_to_task_and_closes_it_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[ScriptedEngine] = []
    monkeypatch.setattr(ScriptedEngine, "close", lambda self: closed.append(self))
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        (worker,) = cluster.workers.values()
        client.sync(worker.plugin_add, WorkerState("t0"), name=PLUGIN)
        first, second = (client.submit(lend_engine, pure=False).result(patience()) for _ in range(2))
        assert (first[:2], second[:2]) == (("t0", True), ("t0", False))
        assert first[2] < second[2] and closed == []
    assert len(closed) == 1
