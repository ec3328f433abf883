from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sf_core.dataplane.bodies import ClaimBody, FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.keys import Caller, Keys
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs import claiming, endings
from tests.sf_core.dataplane.runs.test_run import make_run


def test_a_report_sent_again_is_put_off_until_the_first_is_recorded(
    tmp_path: Path, renderer: Renderer
) -> None:
    async def scenario() -> None:
        run = make_run(tmp_path, renderer)
        [session], _ = await claiming.claim(run, ClaimBody(runner="a0", max=1))
        report = FinishBody(status="failed", error="KeyError: x")
        first = asyncio.ensure_future(endings.finish(run, session, report))
        await asyncio.sleep(0)  # it is over, and its record on the way to the disk
        assert session.session_id not in run.sessions
        with pytest.raises(ApiError, match="is being recorded: send this request again") as refusal:
            await endings.finish(run, session, report)
        assert (refusal.value.status, refusal.value.retry_after_s) == (503, 5)
        assert not first.done()
        await first
        await endings.finish(run, session, report)
        assert run.counters["failed_sessions"] == 1

    asyncio.run(scenario())


def test_who_may_not_report_an_end_is_not_told_that_it_is_being_recorded(
    tmp_path: Path, renderer: Renderer
) -> None:
    keys = Keys("operator's key", welcomes_strangers=True)

    def caller(session_id: str, key: str) -> Caller:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return Caller.of({"type": "http", "path": f"/sessions/{session_id}", "headers": headers}, keys)

    async def scenario() -> None:
        run = make_run(tmp_path, renderer)
        plane = DataPlane(DataplaneOptions(str(tmp_path / "plane")))
        plane.runs[run.spec.run_id] = run
        [session], _ = await claiming.claim(run, ClaimBody(runner="a0", max=1))
        name = session.session_id
        first = asyncio.ensure_future(endings.finish(run, session, FinishBody(status="failed", error="")))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="is being recorded"):
            plane.find_session(name, caller(name, keys.operator))
        for key in ("", "key of nobody", keys.of_session(run.spec, name)):
            with pytest.raises(ApiError, match="Incorrect API key"):
                plane.find_session(name, caller(name, key))
        await first

    asyncio.run(scenario())
