"""However a flow ends, its workers are free afterwards: with a real scheduler and a worker of ours."""

from __future__ import annotations

import time
from pathlib import Path

import dask
import pytest
from distributed import Client

from sf_core.scheduling.cluster import owner_of
from sf_core.stages.run import RunRef
from tasks import interruption
from tasks.interruption import free_workers_at_end
from tests.bench import workers
from tests.bench.waits import wait_until


@pytest.mark.parametrize("end", [None, ValueError("the batch failed")])
def test_a_worker_that_goes_on_after_the_end_of_its_run_is_ended_by_force(
    worker_bench: workers.WorkerBench,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    end: BaseException | None,
) -> None:
    run = RunRef("run", str(tmp_path), "http://127.0.0.1:9", attempt=1)
    process = worker_bench.sf_worker("f0", "--tags", "spot")
    worker_bench.await_worker(process)
    before = workers.tasks_process(process)
    with Client(worker_bench.scheduler, set_as_default=False) as client:
        monkeypatch.setattr(interruption, "dask_client", lambda: client)
        monkeypatch.setattr(interruption, "scheduler_address", lambda: worker_bench.scheduler)
        monkeypatch.setattr(interruption, "PATIENCE_S", 0.2)
        monkeypatch.setattr(interruption, "RELEASE_S", 0.1)
        with dask.annotate(resources={"@f0": 1}, owner=owner_of(run.run_id, run.attempt)):
            blocked = client.submit(time.sleep, 600, key="sleep")
        wait_until(lambda: workers.running_tasks(client) == ["sleep"], "the task to run", every_s=0.1)
        ends: list[BaseException] = []
        try:
            with free_workers_at_end(run):
                if end is not None:
                    raise end
        except BaseException as error:
            ends.append(error)
        assert ends == ([] if end is None else [end])
        assert blocked.cancelled()
        assert not before.is_running()
        assert "tasks still running after 0.2 s are killed: f0" in caplog.messages
    worker_bench.end(process)
