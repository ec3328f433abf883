"""`python -m sf_core.dataplane.gateways.process`: a gateway process, started by the hub.

Serves the turns of the sessions it owns and keeps a journal of them. Which sessions are open, the hub says;
every token comes from there. It ends with its hub.
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
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware

from sf_core.dataplane.agent_routes import REFUSALS, agent_routes
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateways.background import Background
from sf_core.dataplane.gateways.forwarding import Forwarding, Siblings, socket_path
from sf_core.dataplane.gateways.peer import Peer
from sf_core.dataplane.gateways.port import AdoptingServer, Channel
from sf_core.dataplane.gateways.relay import Uplink, UplinkRouter
from sf_core.dataplane.groups import Claim
from sf_core.dataplane.host import SessionHost
from sf_core.dataplane.journal import Fsync, Journal, Record
from sf_core.dataplane.keys import KeyCheck
from sf_core.dataplane.lookup import Lookup
from sf_core.dataplane.metrics import Branches, Metrics
from sf_core.dataplane.observed import Observed
from sf_core.dataplane.records import finished_record, read_opened
from sf_core.dataplane.rendering import Renderer
from sf_core.dataplane.run import OVER, read_renderer, session_name
from sf_core.dataplane.serving import server_config, tune_interpreter
from sf_core.dataplane.session import Session
from sf_core.dataplane.session_tree import session_tree
from sf_core.dataplane.specs import FinishBody, RunSpec
from sf_core.dataplane.turn_recovery import TurnReplay, session_of

log = logging.getLogger(__name__)

LOCK_S = 30.0
"""How long the process waits for one before it to leave its journal."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the hub says on standard input, as JSON."""

    index: int
    num_gateways: int
    folder: str
    """For sockets."""
    key: str | None
    fsync: Fsync
    grace_s: float
    frames_fd: int
    channel_fd: int


class GatewayRun(SessionHost):
    """The sessions of one run that this process owns."""

    def __init__(
        self,
        spec: RunSpec,
        renderer: Renderer,
        journal: Journal,
        router: UplinkRouter,
        grace_s: float,
        peer: Peer,
    ) -> None:
        super().__init__(spec, renderer, journal, router, grace_s)
        self._peer = peer
        self.oldest: dict[str, int] = {}
        """By session: the oldest version in what the journal has of it."""
        self.closed: dict[str, Session] = {}
        """Exported, and not yet in the journal of the hub."""

    def count(self, name: str, number: int = 1) -> None:
        if number:
            self._peer.tell("counted", [self.spec.run_id, name, number])

    def note_started(self, claim: Claim, version: int) -> None:
        name = session_name(self.spec.run_id, claim)
        self.oldest[name] = min(version, self.oldest.get(name, version))

    def open_new(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            if session.session_id not in self.sessions and session.session_id not in self.closed:
                self.open(session)

    def close(self, session_id: str, report: FinishBody) -> Record:
        """What the session leaves behind. It may be asked for again. Raises ApiError for an unknown one."""
        if (session := self.sessions.get(session_id)) is not None:
            self.closed[session_id] = session
            self.drop(session, OVER)
        session = self.closed.get(session_id)
        if session is None or session.claim is None:
            raise ApiError(404, f"Session {session_id} is unknown or over.", code="session_not_found")
        return finished_record(self.export(session, session.claim, report))

    async def compact(self) -> None:
        """Of sessions that are over nothing is asked any more."""
        await self.journal.compact([], self._is_held)

    def _is_held(self, record: Record) -> bool:
        session_id = session_of(record)
        # in this order: a session is in both for a moment when it is closed
        return session_id in self.sessions or session_id in self.closed


class GatewayProcess:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.runs: dict[str, GatewayRun] = {}
        self.metrics = Metrics(Branches(self.runs))
        self.siblings = Siblings(Path(settings.folder))
        self._peer = Peer(self._take, self._hub_is_gone)
        self._uplink = Uplink(self._peer)
        self._orders: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._background = Background()
        self._locks: list[int] = []
        self.server: AdoptingServer | None = None

    @contextlib.asynccontextmanager
    async def serving(self, _: Starlette) -> AsyncIterator[None]:
        frames = socket.socket(fileno=self._settings.frames_fd)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._peer, sock=frames)
        self._background.start(self._obey())
        yield
        self._background.cancel()
        for run in self.runs.values():
            await run.journal.close()
        await self.siblings.close()

    def _take(self, kind: str, value: Any) -> None:
        if not self._uplink.take(kind, value):
            # one after the other, as they were given
            self._orders.put_nowait((kind, value))

    def _hub_is_gone(self) -> None:
        if self.server is None or not self.server.should_exit:
            shutil.rmtree(self._settings.folder, ignore_errors=True)
            # nothing more is written: another process may take over these journals
            os._exit(1)

    async def _obey(self) -> None:
        while True:
            kind, value = await self._orders.get()
            match kind:
                case "ask":
                    await self._answer(*value)
                case "drop":
                    run_id, session_id, reason = value
                    for run, session in self._find(run_id, session_id):
                        run.drop(session, reason)
                case "forget":
                    run_id, session_id = value
                    if run_id in self.runs:
                        self.runs[run_id].closed.pop(session_id, None)
                case "compact" if value in self.runs:
                    self._background.start(self.runs[value].compact())
                case "end":
                    assert self.server is not None
                    self.server.should_exit = True

    async def _answer(self, number: int, kind: str, value: Any) -> None:
        try:
            answer = await self._reply(kind, value)
            self._peer.answer(number, answer)
        except ApiError as error:
            self._peer.refuse(number, error)
        except Exception as error:  # the hub tells whoever asked
            log.exception("%s failed", kind)
            self._peer.refuse(number, ApiError(500, f"The data plane failed: {type(error).__name__}."))

    async def _reply(self, kind: str, value: Any) -> Any:
        match kind:
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
                # JSON, because MessagePack has no integers of more than 64 bits
                return [orjson.dumps(session_tree(*found)) for found in self._find(run_id, session_id)]
            case "figures":
                return self.metrics.text()
        return None

    def _run(self, run_id: str) -> GatewayRun:
        if (run := self.runs.get(run_id)) is None:
            raise ApiError(503, f"Run {run_id} could not be opened in a gateway process.", retry_after_s=5)
        return run

    def _find(self, run_id: str, session_id: str) -> Iterator[tuple[GatewayRun, Session]]:
        """The session, if it is open here."""
        run = self.runs.get(run_id)
        if run is not None and (session := run.sessions.get(session_id)) is not None:
            yield run, session

    async def _open_run(self, spec: dict[str, Any], opened: list[Any], journal: str) -> dict[str, int]:
        """The run as the hub has it; returns the oldest version of each session that has one."""
        told = RunSpec.model_validate(spec)
        sessions = {session.session_id: session for session in read_opened({"opened": opened})}
        if (run := self.runs.get(told.run_id)) is None:
            run = await self._restore_run(told, sessions, Path(journal))
        run.spec = told
        for session_id in [name for name in run.sessions if name not in sessions]:
            run.drop(run.sessions[session_id], OVER)
        run.open_new(sessions.values())
        return run.oldest

    async def _restore_run(self, spec: RunSpec, sessions: dict[str, Session], hubs: Path) -> GatewayRun:
        """With the turns that a process before this one recorded."""
        path = hubs.with_name(f"{spec.run_id}.g{self._settings.index}.journal")
        await self._lock(path)
        journal = Journal(path, self._settings.fsync)
        renderer = await read_renderer(spec.model_dir)
        router = UplinkRouter(spec.run_id, self._uplink)
        run = GatewayRun(spec, renderer, journal, router, self._settings.grace_s, self._peer)
        for session in sessions.values():
            run.open(session)
        replay = TurnReplay(run)
        for record in await journal.replay():
            replay.apply(record)
        replay.finish()
        self.runs[spec.run_id] = run
        return run

    async def _lock(self, path: Path) -> None:
        """Raises ApiError if another process keeps this journal."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            async with asyncio.timeout(LOCK_S):
                while not _is_locked(lock):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ApiError(503, f"Another gateway process works in {path}.", retry_after_s=5) from None
        self._locks.append(lock)


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_gateway_app(process: GatewayProcess, settings: Settings) -> Starlette:
    sessions = Lookup(process.runs, settings.index + 1, settings.num_gateways)
    return Starlette(
        routes=[*agent_routes(sessions)],
        middleware=[
            Middleware(
                Forwarding,
                here=settings.index,
                siblings=process.siblings,
                key=settings.key,
                num_gateways=settings.num_gateways,
            ),
            Middleware(Observed, metrics=process.metrics),
            Middleware(KeyCheck, key=settings.key, runs=process.runs.values),
        ],
        exception_handlers=REFUSALS,
        lifespan=process.serving,
    )


def main() -> None:
    settings = Settings(**json.load(sys.stdin))
    assert settings.fsync in get_args(Fsync)
    # a terminal sends it to every process of the hub's group; the hub says when it is over
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
