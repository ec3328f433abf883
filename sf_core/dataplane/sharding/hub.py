"""The hub's gateway processes: started, kept alive, told what is open, asked for what they hold.

Owns the processes and the choice of one for a connection. The frames between them are in peer.py and
relay.py; what a run asks of its gateways is in hub_run.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware

from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sharding.background import Background
from sf_core.dataplane.sharding.forwarding import RESTART_S, Forwarding, Siblings
from sf_core.dataplane.sharding.hub_run import ShardedRun
from sf_core.dataplane.sharding.owners import PathOwner, gateway_of, owner_of, read_head
from sf_core.dataplane.sharding.peer import Peer
from sf_core.dataplane.sharding.port import give
from sf_core.dataplane.sharding.process import Settings
from sf_core.dataplane.sharding.relay import Downlink

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Seconds to wait for an answer of a gateway process, including the time to restart it."""

STEADY_S = 10.0
"""A process that dies sooner than this after its start is restarted with growing delay."""

MAX_DELAY_S = 10.0
"""Longest delay of restarting a process, and of asking it again to open a run that it could not open."""

END_S = 5.0


class Gateways:
    """All gateway processes of a hub."""

    def __init__(self, folder: Path, key: str | None, options: DataplaneOptions) -> None:
        """The folder is for sockets."""
        self.num_gateways, self.folder = options.num_gateways, folder
        self._key = key
        self._siblings = Siblings(folder)
        self.runs: dict[str, ShardedRun] = {}
        """Runs that the processes know of, by id."""
        self._spread = 0
        self._processes = [
            _Kept(Settings(i, options, str(folder), key), self.runs) for i in range(options.num_gateways)
        ]

    def make_run(
        self, spec: RunSpec, renderer: Renderer, journal: Journal, grace_s: float, memory: Memory
    ) -> ServedRun:
        return ShardedRun(self, spec, renderer, journal, grace_s, memory)

    def forwarding(self) -> Middleware:
        """Middleware of the hub's application, which serves no turns itself."""
        return Middleware(
            Forwarding,
            here=PathOwner.HUB,
            siblings=self._siblings,
            key=self._key,
            num_gateways=self.num_gateways,
        )

    @contextlib.asynccontextmanager
    async def running(self, memory: Memory) -> AsyncIterator[None]:
        for process in self._processes:
            process.memory = memory
            memory.add(process)
        keeping = [asyncio.ensure_future(process.keep()) for process in self._processes]
        try:
            yield
        finally:
            await asyncio.gather(*(process.end() for process in self._processes))
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await self._siblings.close()
            # removed here, because a signal that ended the server ends the process before anything else
            shutil.rmtree(self.folder, ignore_errors=True)

    def owner(self, session_id: str) -> int:
        return gateway_of(session_id, self.num_gateways)

    def tell(self, owner: int, kind: str, value: Any) -> None:
        """No effect while that process is down: it is told everything when it starts."""
        self._processes[owner].tell(kind, value)

    async def ask(self, owner: int, kind: str, value: Callable[[], Any]) -> Any:
        """Ask a process, and again if it dies meanwhile. `value` is called whenever the question is sent, so
        that what is told after that is never older. Raises ApiError 503 without an answer in time, and the
        ApiError with which the process refuses."""
        return await self._processes[owner].ask(kind, value)

    async def open(self, run: ShardedRun) -> None:
        """Return when every process serves the run as it is now. Raises ApiError if one cannot for now; it is
        then asked again in the background until it can."""
        await asyncio.gather(*(process.open(run) for process in self._processes))

    async def figures(self) -> dict[str, bytes]:
        texts = await asyncio.gather(
            *(self.ask(i, "figures", lambda: None) for i in range(self.num_gateways))
        )
        return {f"gateway{i}": text for i, text in enumerate(texts)}

    async def pass_on(self, connection: socket.socket, head: bytes) -> bool:
        """Hand a connection to the process that owns its first request; False if that is the hub, or is down:
        then the hub forwards the request once the process is up."""
        scope = read_head(head)
        key = None if self._key is None else self._key.encode()
        owner = PathOwner.HUB if scope is None else owner_of(scope, key, self.num_gateways)
        if owner is PathOwner.HUB:
            return False
        if owner is PathOwner.ANYWHERE:
            self._spread = owner = (self._spread + 1) % self.num_gateways
        assert isinstance(owner, int)
        return await self._processes[owner].take(connection)


class _Kept:
    """One gateway process, restarted whenever it ends."""

    def __init__(self, settings: Settings, runs: dict[str, ShardedRun]) -> None:
        self._settings, self._runs = settings, runs
        self.memory = Memory()
        """The hub's, in which it is counted."""
        self.num_bytes = 0
        """Bytes of the sessions in the process, as it has said."""
        self._process: asyncio.subprocess.Process | None = None
        self._peer: Peer | None = None
        self._downlink: Downlink | None = None
        self._channel: socket.socket | None = None
        self._reachable = asyncio.Event()
        """Set while the process can be told and asked."""
        self._serving = asyncio.Event()
        """Set while the process knows which runs there are, so that their requests can wait there."""
        self._lost = asyncio.Event()
        self._opening: set[tuple[Peer, str]] = set()
        """Runs that a process is asked to open until it does, by connection and id."""
        self._background = Background()
        self._ending = False

    async def keep(self) -> None:
        delay_s = 0.0
        while not self._ending:
            started = time.monotonic()
            try:
                await self._start()
                await self._tell_all()
                await self._lost.wait()
            except OSError as error:
                log.error("gateway process %d cannot be started: %s", self._settings.index, error)
            await self._reap()
            if self._ending:
                return
            died_soon = time.monotonic() - started < STEADY_S
            delay_s = _longer(delay_s) if died_soon else 0.0
            log.warning("gateway process %d ended; it is started again", self._settings.index)
            await asyncio.sleep(delay_s)

    async def end(self) -> None:
        """Have the process write what it holds and exit; it is killed if it takes too long."""
        self._ending = True
        self._background.cancel()
        self.tell("end", True)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_S)
            await self._reap()

    def tell(self, kind: str, value: Any) -> None:
        if self._peer is not None:
            self._peer.tell(kind, value)

    async def ask(self, kind: str, value: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    await self._reachable.wait()
                    with contextlib.suppress(ConnectionError):
                        if self._peer is not None:
                            return await self._peer.ask(kind, value())
        except TimeoutError:
            message = f"Gateway process {self._settings.index} gave no answer to {kind!r} for {ANSWER_S:g} s."
            raise ApiError(503, message, retry_after_s=RETRY_AFTER_S) from None

    async def open(self, run: ShardedRun) -> None:
        """See Gateways.open."""
        try:
            run.note_versions(await self.ask("run", partial(run.state_for, self._settings.index)))
        except ApiError:
            if self._peer is not None:
                self._have_opened(run, self._peer)
            raise

    async def take(self, connection: socket.socket) -> bool:
        """Hand the process this connection; False if it is not up in time."""
        try:
            async with asyncio.timeout(RESTART_S):
                await self._serving.wait()
        except TimeoutError:
            return False
        return self._channel is not None and give(self._channel, connection)

    async def _start(self) -> None:
        frames, their_frames = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with their_frames, their_channel:
            settings = replace(
                self._settings, frames_fd=their_frames.fileno(), channel_fd=their_channel.fileno()
            )
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sf_core.dataplane.sharding.process",
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(settings.frames_fd, settings.channel_fd),
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(settings)).encode())
        self._process.stdin.close()
        channel.setblocking(False)
        self._channel = channel
        self._lost.clear()
        peer = self._peer = Peer(self._take, self._lose)
        self._downlink = Downlink(peer, self._runs.get)
        await asyncio.get_running_loop().create_unix_connection(lambda: peer, sock=frames)

    async def _tell_all(self) -> None:
        """Tell a new process which runs are open, before anything else, so that later messages find them.
        Returns when it knows, or is lost."""
        if (peer := self._peer) is None:
            return
        named = peer.ask("runs", list(self._runs))
        for run in self._runs.values():
            self._have_opened(run, peer)
        self._reachable.set()
        with contextlib.suppress(ConnectionError):
            await named
            self._serving.set()

    def _have_opened(self, run: ShardedRun, peer: Peer) -> None:
        """Ask this process, again and again, until it serves the run or either is gone."""
        if (peer, run.spec.run_id) not in self._opening:
            self._opening.add((peer, run.spec.run_id))
            self._background.start(self._until_open(run, peer, self._ask_to_open(run, peer)))

    async def _until_open(self, run: ShardedRun, peer: Peer, question: asyncio.Future[Any]) -> None:
        index, run_id, delay_s = self._settings.index, run.spec.run_id, 0.0
        try:
            while True:
                try:
                    return run.note_versions(await question)
                except ApiError as error:
                    log.error("gateway process %d cannot serve %s: %s", index, run_id, error.message)
                delay_s = _longer(delay_s)
                await asyncio.sleep(delay_s)
                if run.released:
                    return
                question = self._ask_to_open(run, peer)
        except ConnectionError:
            return  # the process that is started in its place is told everything
        finally:
            self._opening.discard((peer, run_id))

    def _ask_to_open(self, run: ShardedRun, peer: Peer) -> asyncio.Future[Any]:
        return peer.ask("run", run.state_for(self._settings.index))

    def _take(self, kind: str, value: Any) -> None:
        assert self._downlink is not None
        if self._downlink.take(kind, value):
            return
        if kind == "memory":
            return self._count(value)
        assert kind == "counted", kind
        run_id, name, number = value
        if (run := self._runs.get(run_id)) is not None:
            run.count(name, number)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory.weigh(self)

    def _lose(self) -> None:
        self._count(0)
        self._reachable.clear()
        self._serving.clear()
        self._peer = None
        if self._downlink is not None:
            self._downlink.close()
        self._lost.set()

    async def _reap(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _longer(delay_s: float) -> float:
    return min(max(0.5, 2 * delay_s), MAX_DELAY_S)
