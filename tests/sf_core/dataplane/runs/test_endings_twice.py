from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sf_core.dataplane.bodies import ClaimBody, FinishBody
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
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
