from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sf_core.agents.reports import MAX_ERROR, Reports, _parts
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.options import DataplaneOptions
from tests.bench.dataplane.specs import SPEC


class Stand:
    """A data plane and the sender of its reports, in one process."""

    def __init__(self, http: httpx.AsyncClient, spec: dict[str, Any]) -> None:
        self.http = http
        self.spec = spec
        self.answered: asyncio.Queue[str] = asyncio.Queue()
        self.reports = Reports("/runs/run/finished", self.answered.put_nowait)

    async def register(self) -> None:
        (await self.http.post("/runs", json=self.spec)).raise_for_status()

    async def claim(self, count: int) -> list[str]:
        answer = await self.http.post("/runs/run/claim", json={"runner": "a0", "max": count})
        return [session["session_id"] for session in answer.json()["sessions"]]

    async def answers(self, count: int) -> list[str]:
        return [await self.answered.get() for _ in range(count)]

    async def status(self) -> dict[str, Any]:
        return dict((await self.http.get("/runs/run")).json())


@contextlib.asynccontextmanager
async def sending(folder: Path, model_dir: str) -> AsyncIterator[Stand]:
    spec = SPEC | {"run_dir": str(folder / "run"), "model_dir": model_dir}
    app = make_app("operator", DataplaneOptions(str(folder / "plane")))
    headers = {"Authorization": "Bearer operator"}
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://plane", headers=headers
        ) as http,
    ):
        stand = Stand(http, spec)
        sender = asyncio.ensure_future(stand.reports.send(http))
        yield stand
        sender.cancel()


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        pytest.param({"task_id": 7}, "sessions.0.task_id: Input should be a valid string", id="invalid"),
        pytest.param({"task_id": "x" * 9 * 2**20}, "The request body is over the limit", id="too long"),
    ],
)
async def test_a_report_that_is_refused_fails_its_session_with_the_reason_and_no_other(
    tmp_path: Path,
    model_dir: str,
    report: dict[str, Any],
    reason: str,
) -> None:
    async with sending(tmp_path, model_dir) as stand:
        await stand.register()
        good, bad = await stand.claim(2)
        stand.reports.add_failure(good, "KeyError: x")
        stand.reports.add(bad, {"status": "finished", "reward": 1.0} | report)
        assert await stand.answers(2) == [good, bad]
        status = await stand.status()
        assert status["last_error"].startswith(f"the report of the session was refused: {reason}")
        assert status["counters"]["failed_sessions"] == 2


async def test_a_report_is_sent_until_the_data_plane_takes_it(tmp_path: Path, model_dir: str) -> None:
    async with sending(tmp_path, model_dir) as stand:
        refused = asyncio.Event()

        async def note(response: httpx.Response) -> None:
            if response.status_code == 404:
                refused.set()

        stand.http.event_hooks = {"response": [note]}
        stand.reports.add("run.g0.0.a0", {"status": "failed"})
        await refused.wait()
        assert stand.answered.empty()
        await stand.register()
        assert await stand.answers(1) == ["run.g0.0.a0"]


async def test_whatever_an_agent_raises_can_be_reported(tmp_path: Path, model_dir: str) -> None:
    async with sending(tmp_path, model_dir) as stand:
        await stand.register()
        [name] = await stand.claim(1)
        stand.reports.add_failure(name, "half a pair: \udc80" + "x" * 10**7)
        assert await stand.answers(1) == [name]
        error = (await stand.status())["last_error"]
        assert error.startswith("half a pair: \\udc80x") and len(error) == MAX_ERROR + len(" ...")


@pytest.mark.parametrize("task_id", [np.int64(3), "\udc80"])
def test_what_is_not_json_is_refused_at_once(task_id: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot be written as JSON .*: task_id, environment and the names"):
        Reports("/", lambda name: None).add("s", {"task_id": task_id})


def test_reports_share_requests_of_a_bounded_size() -> None:
    reports = [(str(i), b"x" * size) for i, size in enumerate([600_000, 400_000, 500_000, 2**21, 1])]
    assert [[name for name, _ in part] for part in _parts(reports)] == [["0", "1"], ["2"], ["3"], ["4"]]
