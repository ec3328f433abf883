from __future__ import annotations

import asyncio

import pytest

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.access import Caller, Keys
from tests.bench.dataplane.run_driver import Driver


async def test_a_report_sent_again_is_put_off_until_the_first_is_recorded(driver: Driver) -> None:
    await driver.register()
    [session] = await driver.claimed("a", 1)
    report = {"status": "failed", "error": "KeyError: x"}
    first = asyncio.ensure_future(driver.report(session, **report))
    await asyncio.sleep(0)  # it is over, and its record on the way to the disk
    assert session.session_id not in driver.run.sessions
    with pytest.raises(ApiError, match="is being recorded: send this request again") as refusal:
        await driver.report(session, **report)
    assert (refusal.value.status, refusal.value.retry_after_s) == (503, 5)
    assert not first.done()
    await first
    await driver.report(session, **report)
    assert driver.run.counters["failed_sessions"] == 1


async def test_who_may_not_report_an_end_is_not_told_that_it_is_being_recorded(driver: Driver) -> None:
    keys = Keys("operator's key", welcomes_strangers=True)

    def caller(session_id: str, key: str) -> Caller:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return Caller.from_scope(
            {"type": "http", "path": f"/sessions/{session_id}", "headers": headers}, keys
        )

    await driver.register()
    [session] = await driver.claimed("a", 1)
    name = session.session_id
    first = asyncio.ensure_future(driver.report(session, status="failed"))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="is being recorded"):
        driver.plane.find_session(name, caller(name, keys.operator))
    for key in ("", "key of nobody", keys.of_session(driver.run.spec, name)):
        with pytest.raises(ApiError, match="Incorrect API key"):
            driver.plane.find_session(name, caller(name, key))
    await first
