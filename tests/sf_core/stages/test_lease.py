"""The end of a lease, with a real data plane and its device in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sf_core.agents.judges.judges import Judges
from sf_core.config import EnvironmentConfig, RunConfig
from sf_core.dataplane.api_schemas import Work
from sf_core.environments.registry import tasks_of
from sf_core.scheduling.leases import Lease
from sf_core.scheduling.timeline import Timeline
from sf_core.scheduling.worker_state import WorkerState
from sf_core.stages.lease import open_judges, serve_lease, tasks_to_work_on
from sf_core.stages.run import RunRef
from sf_core.types import Endpoint, Task
from storage.run_directory import RunDirectory
from tests.bench import waits
from tests.bench.dataplane.planes import ServedPlane
from tests.bench.runs import configure


@pytest.mark.parametrize(
    ("route", "reason", "is_switch"),
    [("leases/t0-0.1/revoke", "revoked", True), ("release", "released", False)],
)
def test_only_a_lease_that_was_revoked_begins_a_switch_to_training(
    tmp_path: Path, served_plane: ServedPlane, route: str, reason: str, is_switch: bool
) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    configure(directory, engine={"kind": "scripted", "script": "tests.bench.stacks.echo_package:script"})
    ref = RunRef("run", directory.uri, served_plane.url, attempt=1)
    served_plane.register()
    worker = WorkerState("t0")
    with ThreadPoolExecutor() as pool:
        lease = pool.submit(serve_lease, worker, ref, Lease("rollout", "t0", "t0-0.1"), epoch=1)
        waits.wait_until(lambda: bool(served_plane.live_engines()))
        served_plane.post(f"/runs/run/{route}", {"attempt": 1} if route == "release" else {"within_s": 5})
        assert lease.result(timeout=waits.patience()) == reason
    worker.close()
    switching = worker.measure_switches(ref.uri, 10)
    switching.note_training(Timeline(directory, "t0", "train", "train-0.1"))
    assert (switching.gate.switch_cost_s is not None) == is_switch


def test_held_out_tasks_are_given_out_as_often_as_they_are_answered() -> None:
    config = RunConfig.model_validate({"evaluate": {"answers": 3}})
    tasks = tasks_to_work_on(config)
    held_out = [tasks("holdout", index).task_id for index in range(7)]
    assert held_out == [tasks_of(config.environment)("holdout", i // 3).task_id for i in range(7)]
    assert tasks("train", 5) == tasks_of(config.environment)("train", 5)
    for index in range(7):
        task = tasks_of(config.environment)("holdout", index // 3, "calculator")
        assert tasks("holdout", index, "calculator") == task


def judging(task: Task, answer: str, judges: Any) -> float:
    return 0.0


@pytest.mark.parametrize("work", ["agent", "reward"])
async def test_judges_at_a_url_are_asked_wherever_answers_are_scored(work: Work) -> None:
    judges = {"a": {"url": "http://127.0.0.1:1/v1", "name": "j"}}
    environment = {"reward": f"{__name__}:judging", "judges": judges}

    async def asked(judges: Judges) -> list[Endpoint]:
        async with judges:
            with judges.record() as (found, _):
                return [judge.endpoint for judge in found.values()]

    with open_judges(EnvironmentConfig.model_validate(environment), work) as opened:
        assert opened is not None
        [endpoint] = await asked(opened)
    assert (endpoint.base_url, endpoint.model) == ("http://127.0.0.1:1/v1", "j")


def test_a_worker_that_does_not_score_serves_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")
    judges = {"a": {"url": "http://127.0.0.1:1/v1"}, "b": {"model": "/b"}}
    environment = EnvironmentConfig.model_validate({"reward": f"{__name__}:judging", "judges": judges})
    with open_judges(environment, "agent") as opened:
        assert opened is None
    with pytest.raises(FileNotFoundError, match="/nowhere/python"), open_judges(environment, "reward"):
        raise AssertionError
    with open_judges(EnvironmentConfig(), "reward") as opened:
        assert opened is None
