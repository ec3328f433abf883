"""Requests of one session, of which a long one is encoded in a thread."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.gateway.endpoint import RequestOrder
from sf_core.dataplane.sessions.session import Session
from tests.bench import waits
from tests.bench.dataplane import specs

LONG = "the log says 12 errors at /usr/lib/x.py:30\n" * 20_000


class Plane:
    """A data plane in this event loop, with a session that no engine answers."""

    def __init__(self, folder: Path, model_dir: str) -> None:
        self.app = make_app("key-of-the-operator")
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://plane",
            headers={"Authorization": "Bearer key-of-the-operator"},
            timeout=waits.patience(),
        )
        self._folders = {"run_dir": str(folder / "run"), "model_dir": model_dir}

    async def start(self) -> Session:
        spec = specs.changed(specs.SPEC, context_length=2**20, session_timeout_s=600.0, **self._folders)
        assert (await self.http.post("/runs", json=spec)).status_code == 200
        claim = await self.http.post("/runs/run/claim", json={"runner": "a", "max": 1})
        [session] = claim.json()["sessions"]
        return self.app.state.plane.runs["run"].sessions[session["session_id"]]  # type: ignore[no-any-return]

    def ask(self, session: Session, text: str) -> asyncio.Task[httpx.Response]:
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        path = f"/sessions/{session.session_id}/v1/chat/completions"
        return asyncio.create_task(self.http.post(path, json=body))


@pytest.fixture
def plane(tmp_path: Path, model_dir: str) -> Plane:
    return Plane(tmp_path, model_dir)


async def test_a_short_request_is_opened_behind_a_long_one(plane: Plane) -> None:
    session = await plane.start()
    tasks = [plane.ask(session, LONG), plane.ask(session, "hi")]
    await waits.until(lambda: len(session.prompts) == 2)
    for task in tasks:
        task.cancel()
    assert [prompt.messages[-1]["content"] for prompt in session.prompts] == [LONG, "hi"]


async def test_a_session_that_ends_meanwhile_gets_no_prompt(plane: Plane) -> None:
    session = await plane.start()
    asked = plane.ask(session, LONG)
    for _ in range(20):  # the request is read, and its thread has begun
        await asyncio.sleep(0)
    ended = {"status": "finished", "reward": 1.0}
    assert (await plane.http.post(f"/sessions/{session.session_id}/finish", json=ended)).status_code == 200
    response = await asked
    assert response.status_code == 404 and session.session_id in response.json()["error"]["message"]
    assert not session.prompts


async def test_a_session_without_an_id_waits_for_nobody() -> None:
    order = RequestOrder()
    async with order.enter(None), order.enter(None), order.enter("a"), order.enter("b"):
        pass
