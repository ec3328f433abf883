"""`python -m sf_core.dataplane.sharding.process`: a gateway process, started by the hub.

Serves the turns of the sessions it owns and keeps a journal of them. The hub decides which sessions are open
and relays every token. The process ends with its hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
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
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.records import read_opened
from sf_core.dataplane.serving import server_config, tune_interpreter
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.view import session_tree
from sf_core.dataplane.sharding.background import Background
from sf_core.dataplane.sharding.forwarding import Forwarding, Siblings, socket_path
from sf_core.dataplane.sharding.gateway_run import RunShard
from sf_core.dataplane.sharding.named_runs import NamedRuns, Opening
from sf_core.dataplane.sharding.peer import Peer
from sf_core.dataplane.sharding.port import AdoptingServer, Channel
from sf_core.dataplane.sharding.relay import Uplink, UplinkRouter

log = logging.getLogger(__name__)

LOCK_S = 30.0
"""Seconds to wait for an earlier process to release the lock of its journal."""

MEMORY_S = 0.5
"""Seconds between reports of the memory of sessions, which the hub bounds."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that the hub writes to standard input, as JSON."""

    index: int
    options: DataplaneOptions
    folder: str
    """Folder of the Unix sockets."""
    key: str | None
    frames_fd: int = -1
    channel_fd: int = -1
    """Inherited descriptors: of the stream to the hub, and of the channel on which connections arrive."""


class GatewayProcess:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.named = NamedRuns()
        self.runs = self.named.open
        self.memory = Memory()
        self.metrics = Metrics(Sessions(self.runs))
        self.siblings = Siblings(Path(settings.folder))
        self._peer = Peer(self._take, self._hub_is_gone)
        self._uplink = Uplink(self._peer)
        self._in_order: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by run: its messages are handled one after the other, in their order."""
        self._background = Background()
        self._locks: dict[Path, int] = {}
        """File descriptors of the journals' locks, held until the process ends."""
        self.server: AdoptingServer | None = None

    @contextlib.asynccontextmanager
    async def serving(self, _: Starlette) -> AsyncIterator[None]:
        frames = socket.socket(fileno=self._settings.frames_fd)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._peer, sock=frames)
        self._background.start(self._report_memory())
        yield
        self._background.cancel()
        for run in self.runs.values():
            await run.journal.close()
        await self.siblings.close()

    async def _report_memory(self) -> None:
        while True:
            self._peer.tell("memory", self.memory.num_bytes)
            await asyncio.sleep(MEMORY_S)

    def _take(self, kind: str, value: Any) -> None:
        if not self._uplink.take(kind, value):
            self._background.start(self._obey(kind, value))

    def _hub_is_gone(self) -> None:
        if self.server is None or not self.server.should_exit:
            shutil.rmtree(self._settings.folder, ignore_errors=True)
            # nothing more is written: another process may take over these journals
            os._exit(1)

    async def _obey(self, kind: str, value: Any) -> None:
        run_id = _run_of(kind, value)
        async with contextlib.nullcontext() if run_id is None else self._in_order[run_id]:
            await self._carry_out(kind, value)

    async def _carry_out(self, kind: str, value: Any) -> None:
        match kind:
            case "ask":
                await self._answer(*value)
            case "drop":
                run_id, session_id, reason = value
                run = self.runs.get(run_id)
                if run is not None and (session := run.sessions.get(session_id)) is not None:
                    run.drop(session, reason)
            case "forget":
                run_id, session_id = value
                if run_id in self.runs:
                    self.runs[run_id].forget_closed(session_id)
            case "compact" if value in self.runs:
                self._background.start(self.runs[value].compact())
            case "released" if value in self.runs:
                self.runs[value].released = True
            case "left":
                await self._leave_run(value)
            case "end":
                for earlier in list(self._in_order.values()):
                    async with earlier:
                        pass  # all that was asked before is answered now
                assert self.server is not None
                self.server.should_exit = True

    async def _answer(self, number: int, kind: str, value: Any) -> None:
        try:
            return self._peer.answer(number, await self._reply(kind, value))
        except ApiError as error:
            refusal = error
        except Exception as error:  # the hub answers the request with it
            log.exception("%s failed", kind)
            refusal = ApiError(500, f"The data plane failed: {type(error).__name__}.")
        if kind == "run":
            self.named.note_failure(value[0]["run_id"], refusal.message)
        self._peer.refuse(number, refusal)

    async def _reply(self, kind: str, value: Any) -> Any:
        match kind:
            case "runs":
                self.named.name(value)
            case "run":
                return await self._open_run(*value)
            case "opened":
                run_id, opened = value
                self._run(run_id).open_new(read_opened({"opened": opened}))
            case "close":
                run_id, session_id, report = value
                return self._run(run_id).close(session_id, FinishBody.model_validate(report))
            case "tree":
                run_id, session_id = value
                run = self._run(run_id)
                # JSON, because MessagePack has no integers of more than 64 bits
                return orjson.dumps(session_tree(run.spec, run.find(session_id)))
            case "figures":
                return self.metrics.text()
        return None

    def _run(self, run_id: str) -> RunShard:
        if (run := self.runs.get(run_id)) is None:
            raise ApiError(503, f"Run {run_id} could not be opened in a gateway process.", retry_after_s=5)
        return run

    async def _open_run(
        self, spec: dict[str, Any], opened: list[Any], journal: str, released: bool
    ) -> dict[str, int]:
        """Serve the run as the hub has it; returns the oldest policy version of each session that has one."""
        told = RunSpec.model_validate(spec)
        sessions = {session.session_id: session for session in read_opened({"opened": opened})}
        self.named.name([told.run_id])
        if (run := self.runs.get(told.run_id)) is None:
            run = await self._restore_run(told, sessions, Path(journal))
        run.spec, run.released = told, released
        run.keep_only(sessions)
        run.open_new(sessions.values())
        self.named.add(run)
        return run.oldest

    async def _restore_run(self, spec: RunSpec, sessions: dict[str, Session], hubs: Path) -> RunShard:
        """Open the run with the turns that a process before this one recorded."""
        path = hubs.with_suffix(".gateways") / f"{self._settings.index}.journal"
        await self._lock(path)
        renderer = await read_renderer(spec.model_dir)
        journal = Journal(path, self._settings.options.fsync)
        router = UplinkRouter(spec.run_id, self._uplink)
        run = RunShard(
            spec, renderer, journal, router, self._settings.options.grace_s, self.memory, self._peer
        )
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
            os.close(self._locks.pop(run.journal.path))

    async def _lock(self, path: Path) -> None:
        """Lock this journal. Raises ApiError if another process holds it."""
        if path in self._locks:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            async with asyncio.timeout(LOCK_S):
                while not _is_locked(lock):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            os.close(lock)
            raise ApiError(503, f"Another gateway process works in {path}.", retry_after_s=5) from None
        self._locks[path] = lock


def _run_of(kind: str, value: Any) -> str | None:
    """The run that a message is about; None: about none, or about all."""
    if kind == "ask":
        _, kind, value = value
    match kind:
        case "run":
            return str(value[0]["run_id"])
        case "opened" | "close" | "tree" | "drop" | "forget":
            return str(value[0])
        case "compact" | "released" | "left":
            return str(value)
    return None


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_gateway_app(process: GatewayProcess, settings: Settings) -> Starlette:
    sessions = Lookup(process.runs, settings.index + 1, settings.options.num_gateways)
    return Starlette(
        routes=[*agent_routes(sessions)],
        middleware=[
            Middleware(
                Forwarding,
                here=settings.index,
                siblings=process.siblings,
                key=settings.key,
                num_gateways=settings.options.num_gateways,
            ),
            Middleware(Opening, runs=process.named, key=settings.key),
            Middleware(Observed, metrics=process.metrics),
            Middleware(KeyCheck, key=settings.key, runs=process.runs.values),
        ],
        exception_handlers=REFUSALS,
        lifespan=process.serving,
    )


def main() -> None:
    given = json.load(sys.stdin)
    settings = Settings(**given | {"options": DataplaneOptions(**given["options"])})
    # a terminal sends SIGINT to every process of the hub's group; the hub says when to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = GatewayProcess(settings)
    config = server_config(
        make_gateway_app(process, settings), socket_path(Path(settings.folder), settings.index)
    )
    process.server = _GatewayServer(config, Channel(socket.socket(fileno=settings.channel_fd)))
    tune_interpreter()
    process.server.run()


class _GatewayServer(AdoptingServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


if __name__ == "__main__":
    main()
