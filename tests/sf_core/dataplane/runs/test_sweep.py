from __future__ import annotations

import asyncio

import pytest

from sf_core.dataplane.control import plane as dataplane_module
from sf_core.dataplane.runs import claiming
from tests.bench.dataplane.run_driver import Driver
from tests.bench.waits import until


async def test_a_run_that_cannot_be_let_go_is_served_and_keeps_no_other_from_being_looked_after(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dataplane_module, "SWEEP_S", 0.001)
    monkeypatch.setattr(dataplane_module, "LET_GO_S", 0.0)
    plane = driver.plane
    await driver.register(run_id="over")
    await driver.register(run_id="run")
    file = driver.folder / "plane" / "open-runs.json"
    content = file.read_bytes()
    file.unlink()
    # cannot be replaced
    file.mkdir()
    with pytest.raises(OSError):
        await plane.release(plane.run("over"))
    sweeping = asyncio.ensure_future(plane.sweep())
    sentence = "regular checks of run over failed"
    await until(lambda: any(sentence in message for message in caplog.messages))
    assert "over" in plane.runs and "over" in plane.sealers

    await driver.claim()
    monkeypatch.setattr(claiming, "RUNNER_SILENCE_S", -1.0)
    await until(lambda: not driver.run.sessions)

    file.rmdir()
    file.write_bytes(content)
    await until(lambda: "over" not in plane.runs)
    sweeping.cancel()
