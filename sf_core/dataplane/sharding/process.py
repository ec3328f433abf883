"""`python -m sf_core.dataplane.sharding.process`: a gateway process, started by the hub.

Serves the turns of the sessions it owns and keeps a journal of them. The hub decides which sessions are open
and relays every token. The process ends with its hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware

from sf_core.dataplane.bodies import FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import read_renderer
from sf_core.dataplane.control.metrics import Sessions
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.agent_routes import REFUSALS, agent_routes
from sf_core.dataplane.gateway.keys import KeyCheck
from sf_core.dataplane.gateway.lookup import Lookup
from sf_core.dataplane.gateway.metrics import Metrics
from sf_core.dataplane.gateway.observed import Observed
from sf_core.dataplane.journal.events import reader
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.events import read_opened
from sf_core.dataplane.serving import server_config, tune_interpreter
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.view import session_tree
from sf_core.dataplane.sharding.gateway_run import RunShard
from sf_core.dataplane.sharding.named_runs import NamedRuns, Opening
from sf_core.dataplane.sharding.peer import Peer
from sf_core.dataplane.sharding.relay import Uplink, UplinkRouter

LOCK_S, LOOK_S = 30.0, 0.05
"""Seconds to wait for an earlier process to release the lock of its journal, and between looks."""

MEMORY_S = 0.5
"""Seconds between reports of the memory of sessions, which the hub bounds."""

_read_spec: Callable[[bytes], RunSpec] = reader(RunSpec)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that the hub writes to standard input, as JSON."""

    index: int
    options: DataplaneOptions
    key: str | None
    frames_fd: int
    listening_fd: int
    """Inherited descriptors: of the stream to the hub, and of the port."""


class GatewayProcess:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.named = NamedRuns()
        self.runs = self.named.open
        self.memory = Memory()
        self.metrics = Metrics(Sessions(self.runs))
        self._hub = Peer(self._hub_is_gone, self._obey)
        self._hub.handlers["runs"] = self.named.name
        self._uplink = Uplink(self._hub)
        self._in_order: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by run: its messages are handled one after the other, in their order."""
        self._locks: dict[Path, IO[str]] = {}
        """Locks of the open journals."""
        self.server: uvicorn.Server | None = None

    @contextlib.asynccontextmanager
    async def serving(self, _: Starlette) -> AsyncIterator[None]:
        frames = socket.socket(fileno=self._settings.frames_fd)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._hub, sock=frames)
        self._hub.start(self._report_memory())
        yield
        for run in self.runs.values():
            await run.journal.close()

    async def _report_memory(self) -> None:
        while True:
            self._hub.tell("memory", self.memory.num_bytes)
            await asyncio.sleep(MEMORY_S)

    def _hub_is_gone(self) -> None:
        if self.server is None or not self.server.should_exit:
            # nothing more is written: another process may take over these journals
            os._exit(1)

    async def _obey(self, kind: str, *facts: Any) -> Any:
        """Carry out what the hub has told, and return what it has asked for."""
        match kind:
            case "figures":
                return self.metrics.text()
            case "end":
                for earlier in list(self._in_order.values()):
                    async with earlier:
                        pass  # all that was asked before is answered now
                assert self.server is not None
                self.server.should_exit = True
            case _:
                return await self._obey_in_order(kind, *facts)

    async def _obey_in_order(self, kind: str, run_id: str, *facts: Any) -> Any:
        async with self._in_order[run_id]:
            if kind == "run":
                return await self._open_run(run_id, *facts)
            if kind == "left":
                return await self._leave_run(run_id)
            if (run := self.runs.get(run_id)) is None:
                raise ApiError(503, f"Run {run_id} is not open in a gateway process.", retry_after_s=5)
            match kind, *facts:
                case "opened", opened:
                    run.open_new(read_opened(opened).sessions())
                case "close", session_id, report:
                    return run.close(session_id, FinishBody.model_validate(report))
                case "tree", session_id:
                    # JSON, because MessagePack has no integers of more than 64 bits
                    return orjson.dumps(session_tree(run.spec, run.find(session_id)))
                case "drop", session_id, reason:
                    run.drop(run.find(session_id), reason)
                case "forget", session_id:
                    run.forget_closed(session_id)
                case ["compact"]:
                    self._hub.start(run.compact())
                case ["released"]:
                    run.released = True

    async def _open_run(
        self, run_id: str, spec: bytes, opened: bytes, journal: str, released: bool
    ) -> dict[str, int]:
        """Serve the run as the hub has it; returns the oldest policy version of each session that has one."""
        self.named.name(run_id)
        told = _read_spec(spec)
        sessions = {session.session_id: session for session in read_opened(opened).sessions()}
        try:
            run = self.runs.get(run_id) or await self._restore_run(told, sessions, Path(journal))
        except Exception as error:
            self.named.note_failure(run_id, str(error))
            raise
        run.spec, run.released = told, released
        run.keep_only(sessions)
        run.open_new(sessions.values())
        self.named.add(run)
        return run.oldest

    async def _restore_run(self, spec: RunSpec, sessions: dict[str, Session], hubs: Path) -> RunShard:
        """Open the run with the turns that a process before this one recorded."""
        path = hubs.with_suffix(".gateways") / f"{self._settings.index}.journal"
        await self._lock(path)
        options, router = self._settings.options, UplinkRouter(spec.run_id, self._uplink)
        renderer, journal = await read_renderer(spec.model_dir), Journal(path, options.fsync)
        run = RunShard(spec, renderer, journal, router, options.grace_s, self.memory, self._hub)
        try:
            await run.restore(sessions.values())
        except Exception:
            # the hub asks again, and opening starts from the beginning
            await run.leave()
            raise
        return run

    async def _leave_run(self, run_id: str) -> None:
        if (run := self.named.remove(run_id)) is not None:
            await run.leave()
            self._locks.pop(run.journal.path).close()

    async def _lock(self, path: Path) -> None:
        """Lock this journal. Raises ApiError if another process holds it."""
        if path in self._locks:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 held until the run is left
        for _ in range(int(LOCK_S / LOOK_S)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locks[path] = lock
                return
            await asyncio.sleep(LOOK_S)
        lock.close()
        raise ApiError(503, f"Another gateway process works in {path}.", retry_after_s=5)


def make_gateway_app(process: GatewayProcess, settings: Settings) -> Starlette:
    sessions = Lookup(process.runs, settings.index + 1, settings.options.num_gateways)
    return Starlette(
        routes=[*agent_routes(sessions)],
        middleware=[
            Middleware(Opening, runs=process.named, key=settings.key),
            Middleware(Observed, metrics=process.metrics),
            Middleware(KeyCheck, key=settings.key, runs=process.runs.values),
        ],
        exception_handlers=REFUSALS,
        lifespan=process.serving,
    )


class _Server(uvicorn.Server):
    """Ends when the hub says so. A terminal sends SIGINT to every process of the hub's group."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = json.load(sys.stdin)
    settings = Settings(**given | {"options": DataplaneOptions(**given["options"])})
    process = GatewayProcess(settings)
    process.server = _Server(server_config(make_gateway_app(process, settings)))
    tune_interpreter()
    process.server.run(sockets=[socket.socket(fileno=settings.listening_fd)])


if __name__ == "__main__":
    main()
