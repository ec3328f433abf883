"""A gateway process after its start, as hub and agents see it: real frames and requests, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.events import encode
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.events import Opened
from sf_core.dataplane.serving import server_config
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sharding import hub, named_runs
from sf_core.dataplane.sharding.hub import GatewayLink, Gateways
from sf_core.dataplane.sharding.hub_run import ShardedRun
from sf_core.dataplane.sharding.peer import Peer
from sf_core.dataplane.sharding.process import GatewayProcess, Settings, make_gateway_app
from tests.sf_core.dataplane.cluster import in_loop
from tests.sf_core.dataplane.specs import SPEC

KEY = "key of the run"


class Stand:
    def __init__(self, process: GatewayProcess, hub: Peer, http: httpx.AsyncClient, folder: Path) -> None:
        self.process, self.hub, self.http, self.folder = process, hub, http, folder

    def open(self, run_id: str, model_dir: str) -> asyncio.Future[Any]:
        """Open a run with one open session, as the hub does."""
        spec = RunSpec(**SPEC | {"run_id": run_id, "run_dir": "unused", "model_dir": model_dir, "key": KEY})
        opened = encode(Opened.of([Session(f"{run_id}.open.1")]))
        return self.hub.ask(
            "run", run_id, encode(spec), opened, str(self.folder / f"{run_id}.journal"), False
        )

    @contextlib.contextmanager
    def locked_out(self, run_id: str) -> Iterator[None]:
        """Hold the journal's lock, as an earlier process that still runs would."""
        lock = self.folder / f"{run_id}.gateways" / "0.lock"
        lock.parent.mkdir(parents=True)
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def ask(self, session_id: str) -> asyncio.Task[httpx.Response]:
        """Send a request of the session's agent."""
        return asyncio.ensure_future(self.http.get(f"/sessions/{session_id}/v1/models"))


@contextlib.asynccontextmanager
async def gateway(folder: Path, hub: Peer | None = None) -> AsyncIterator[Stand]:
    """A gateway process at the other end of `hub`, in this process."""
    ours, frames = socket.socketpair()
    settings = Settings(0, DataplaneOptions(grace_s=0.1), "key", frames.detach(), -1)
    process = GatewayProcess(settings)
    app = make_gateway_app(process, settings)
    process.server = uvicorn.Server(server_config(app))
    hub = hub or Peer(lambda: None)
    hub.handlers |= {"memory": lambda num_bytes: None}
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test", headers={"Authorization": f"Bearer {KEY}"}
    )
    connection, _ = await asyncio.get_running_loop().create_unix_connection(lambda: hub, sock=ours)
    async with http, process.serving(app):
        yield Stand(process, hub, http, folder)
        # without it the process ends with its hub at once
        process.server.should_exit = True
        connection.close()
        await passed()


async def passed() -> None:
    """Let the event loop do everything that needs no waiting."""
    for _ in range(100):
        await asyncio.sleep(0)


@in_loop
async def test_a_request_waits_for_its_run_and_no_run_for_another(tmp_path: Path, model_dir: str) -> None:
    async with gateway(tmp_path) as stand:
        of_slow, of_quick = stand.ask("slow.open.1"), stand.ask("quick.open.1")
        await passed()
        assert not of_slow.done() and not of_quick.done(), "the hub has not said anything yet"
        with stand.locked_out("slow"):
            stand.hub.tell("runs", "slow", "quick")
            slow = stand.open("slow", model_dir)
            assert await stand.open("quick", model_dir) == {}
            assert (await of_quick).status_code == 200
            assert b"sf_" in await stand.hub.ask("figures")
            assert not slow.done() and not of_slow.done()
        assert await slow == {}
        assert (await of_slow).status_code == 200
        assert [*stand.process.runs] == ["slow", "quick"], "in the order of the hub"


@in_loop
async def test_orders_of_a_run_are_carried_out_as_they_were_given(tmp_path: Path, model_dir: str) -> None:
    async with gateway(tmp_path) as stand:
        with stand.locked_out("run"):
            stand.open("run", model_dir)
            opened = stand.hub.ask("opened", "run", encode(Opened.of([Session("run.open.2")])))
            stand.hub.tell("drop", "run", "run.open.2", "over")
            tree = stand.hub.ask("tree", "run", "run.open.2")
            await passed()
        await opened
        with pytest.raises(ApiError, match=r"Session run\.open\.2 is unknown or over"):
            await tree


@in_loop
async def test_a_run_that_cannot_be_opened_is_told_of_and_opened_when_it_is_asked_for_again(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_runs, "OPEN_S", 0.01)
    async with gateway(tmp_path) as stand:
        with pytest.raises(ApiError, match="nowhere"):
            await stand.open("run", str(tmp_path / "nowhere"))
        refused = await stand.ask("run.open.1")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "has not opened it within 0.01 s: " in refused.json()["error"]["message"]
        stand.hub.tell("runs", "run", "other")
        await stand.open("other", model_dir)
        assert (await stand.ask("other.open.1")).status_code == 200
        assert (await stand.http.get("/v1/models")).status_code == 200, "of the runs that are open"
        await stand.open("run", model_dir)
        assert (await stand.ask("run.open.1")).status_code == 200
        assert (await stand.ask("run.open.2")).status_code == 404


@in_loop
async def test_the_hub_asks_for_a_run_again_until_it_is_open(
    tmp_path: Path,
    model_dir: str,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hub, "MAX_DELAY_S", 0.001)
    gateways = Gateways("key", DataplaneOptions(grace_s=0.1))
    spec = RunSpec(**SPEC, run_dir="unused", model_dir=str(tmp_path / "away"))
    run = ShardedRun(gateways, spec, renderer, Journal(tmp_path / "run.journal"), 1.0, Memory())
    link = GatewayLink(0, {"run": run}, Memory(), lambda: None)
    async with gateway(tmp_path, link) as stand, asyncio.timeout(20):
        link.tell_all()
        while "gateway process 0 cannot serve run" not in caplog.text:
            await asyncio.sleep(0.001)
        (tmp_path / "away").symlink_to(model_dir)
        while not stand.process.runs:
            await asyncio.sleep(0.001)
    await run.journal.close()
