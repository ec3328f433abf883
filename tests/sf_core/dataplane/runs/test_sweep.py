from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sf_core.dataplane.bodies import ClaimBody, RunSpec
from sf_core.dataplane.control import plane as dataplane_module
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs import claiming
from tests.bench.dataplane.specs import SPEC
from tests.patience import patience, until


async def until_told(caplog: pytest.LogCaptureFixture, sentence: str) -> None:
    await until(lambda: any(sentence in message for message in caplog.messages))


def test_a_run_that_cannot_be_let_go_is_served_and_keeps_no_other_from_being_looked_after(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dataplane_module, "SWEEP_S", 0.001)
    monkeypatch.setattr(dataplane_module, "LET_GO_S", 0.0)

    async def scenario() -> None:
        plane = DataPlane(DataplaneOptions(str(tmp_path / "plane")))
        for name in ("over", "other"):
            spec = SPEC | {"run_id": name, "run_dir": str(tmp_path / name), "model_dir": model_dir}
            await plane.register(RunSpec.model_validate(spec))
        file = tmp_path / "plane" / "open-runs.json"
        content = file.read_bytes()
        file.unlink()
        # cannot be replaced
        file.mkdir()
        with pytest.raises(OSError):
            await plane.release(plane.run("over"))
        sweeping = asyncio.ensure_future(plane.sweep())
        await until_told(caplog, "regular checks of run over failed")
        assert "over" in plane.runs and "over" in plane.sealers

        other = plane.run("other")
        await claiming.claim(other, ClaimBody(runner="a0", max=2))
        monkeypatch.setattr(claiming, "RUNNER_SILENCE_S", -1.0)
        while other.sessions:
            await asyncio.sleep(0.001)

        file.rmdir()
        file.write_bytes(content)
        while "over" in plane.runs:
            await asyncio.sleep(0.001)
        sweeping.cancel()
        await plane.close()

    asyncio.run(asyncio.wait_for(scenario(), patience()))
