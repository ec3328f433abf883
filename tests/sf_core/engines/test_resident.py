"""The engine of a worker: kept at rest between leases of the same settings."""

from __future__ import annotations

import pytest

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.registry import ResidentEngine
from sf_core.engines.scripted import ScriptedEngine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake
from sf_core.types import WeightsRef


def config(max_running: int = 8) -> RunConfig:
    script = "tests.bench.stacks.echo_package:script"
    return RunConfig.model_validate(
        {"engine": {"kind": "scripted", "script": script, "max_running": max_running}}
    )


@pytest.fixture
def resident() -> ResidentEngine:
    return ResidentEngine(WorkerDevice())


def test_an_engine_stays_until_a_run_with_other_settings_wants_one(resident: ResidentEngine) -> None:
    with resident.lend(config(), "start") as (first, is_new):
        assert is_new
        leased = DrivenEngine(first)
        awake(leased, WeightsRef(3, ""))
        leased.rest()
    with resident.lend(config(), "start") as (kept, is_new):
        assert (kept is first, is_new) == (True, False)
    slow = config(max_running=4)
    for other in ((slow, "start"), (slow, "another"), (slow, "another", "made again")):
        with resident.lend(*other) as (engine, is_new):
            assert is_new and engine is not first


def test_an_engine_that_failed_is_not_kept(resident: ResidentEngine) -> None:
    with pytest.raises(MemoryError), resident.lend(config(), "start") as (broken, _):
        raise MemoryError
    with resident.lend(config(), "start") as (engine, is_new):
        assert is_new and engine is not broken


def test_the_end_of_a_worker_closes_the_engine_that_rests_and_leaves_one_that_serves(
    resident: ResidentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    monkeypatch.setattr(ScriptedEngine, "close", lambda self: closed.append(self))
    with resident.lend(config(), "start") as (engine, _):
        resident.close()
        assert closed == []
    resident.close()
    resident.close()
    assert closed == [engine]
