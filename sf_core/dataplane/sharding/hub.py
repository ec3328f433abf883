"""The hub's gateway processes: started, each on a port of its own, and started again when they end.

Owns processes, their ports, and which runs they are told of. What a run asks of them is in hub_run.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, cast
from zlib import crc32

from starlette.middleware import Middleware

from sf_core.config.addresses import MAX_PORT
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.recovery import MakeRun
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sharding.forwarding import Forwarding
from sf_core.dataplane.sharding.hub_run import ShardedRun
from sf_core.dataplane.sharding.peer import Peer
from sf_core.dataplane.sharding.process import Settings
from sf_core.dataplane.sharding.relay import Downlink

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Seconds to wait for an answer of a gateway process, including the time to restart it."""

STEADY_S = 10.0
"""A process that dies sooner than this after its start is restarted with growing delay."""

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 10.0
"""Shortest and longest delay of starting a process again, and of asking it again to open a run."""

END_S = TAKEN_S = 5.0
"""Seconds for a process to end, and to wait for a port: gateways end a moment after a hub that is killed."""


class Gateways:
    """All gateway processes of a hub."""

    def __init__(self, key: str | None, options: DataplaneOptions) -> None:
        self._key = key
        self.processes = [Gateway(index, options, key) for index in range(options.num_gateways)]
        self._spread = itertools.cycle(self.processes)
        self.make_run: MakeRun = partial(ShardedRun, self)

    def listen(self, listen: Callable[[int], socket.socket], port: int) -> None:
        """Open the processes' ports: those that follow the hub's, or any free ones if that is 0. They stay
        open as long as the hub lives, so that requests wait for a process that is started again. Raises
        OSError, and ValueError if there are not enough ports."""
        if (last := port + len(self.processes)) > MAX_PORT:
            raise ValueError(f"--port {port}: the last gateway process would have port {last}")
        for process in self.processes:
            process.listen(listen, port and port + 1 + process.index)

    def forwarding(self) -> Middleware:
        return Middleware(Forwarding, url_of=self._url_of, key=self._key)

    @contextlib.asynccontextmanager
    async def running(self, runs: Mapping[str, ServedRun], memory: Memory) -> AsyncIterator[None]:
        ours = cast(Mapping[str, ShardedRun], runs)
        keeping = [asyncio.ensure_future(process.keep(ours, memory)) for process in self.processes]
        try:
            asking = (process.ask(GatewayLink.all_opened) for process in self.processes)
            # what is not open in time is asked for again
            await asyncio.gather(*asking, return_exceptions=True)
            yield
        finally:
            await asyncio.gather(*(process.end() for process in self.processes))
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def of(self, session_id: str) -> Gateway:
        """The process that serves this session."""
        return self.processes[crc32(session_id.encode()) % len(self.processes)]

    def _url_of(self, session_id: str | None) -> str:
        return (next(self._spread) if session_id is None else self.of(session_id)).url

    async def figures(self) -> dict[str, bytes]:
        asking = (process.ask(lambda link: link.ask("figures")) for process in self.processes)
        return {f"gateway{i}": text for i, text in enumerate(await asyncio.gather(*asking))}


class Gateway:
    """One gateway process, started again whenever it ends."""

    def __init__(self, index: int, options: DataplaneOptions, key: str | None) -> None:
        self.index = index
        self._options, self._key = options, key
        self.port, self.url = 0, ""
        """Port of the process, and URL for requests from this machine, once it listens."""
        self._process: asyncio.subprocess.Process | None = None
        self._link: GatewayLink | None = None
        self._reachable = asyncio.Event()
        """Set while there is a link."""
        self._lost = asyncio.Event()
        self._ending = False

    def listen(self, listen: Callable[[int], socket.socket], port: int) -> None:
        """Open the port of the process. Raises OSError."""
        deadline = time.monotonic() + TAKEN_S
        while True:
            try:
                self._listening = listen(port)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    reason = os.strerror(error.errno) if error.errno else error
                    raise OSError(f"port {port}, of its gateway process {self.index}: {reason}") from None
                time.sleep(0.05)
        host, self.port, *_ = self._listening.getsockname()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def keep(self, runs: Mapping[str, ShardedRun], memory: Memory) -> None:
        delay_s = 0.0
        while not self._ending:
            started = time.monotonic()
            try:
                self._link = await self._start(runs, memory)
                self._link.tell_all()
                self._reachable.set()
                await self._lost.wait()
            except OSError as error:
                log.error("gateway process %d cannot be started: %s", self.index, error)
            self._lose()
            await self._reap()
            if self._ending:
                return
            died_soon = time.monotonic() - started < STEADY_S
            delay_s = min(max(FIRST_DELAY_S, 2 * delay_s), MAX_DELAY_S) if died_soon else 0.0
            log.warning("gateway process %d ended; it is started again", self.index)
            await asyncio.sleep(delay_s)

    async def end(self) -> None:
        """Have the process write what it holds and exit; it is killed if it takes too long."""
        self._ending = True
        self.tell("end")
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_S)
            await self._reap()

    def tell(self, kind: str, *facts: Any) -> None:
        """No effect while the process is down: it is told everything when it starts."""
        if self._link is not None:
            self._link.tell(kind, *facts)

    async def ask(self, question: Callable[[GatewayLink], asyncio.Future[Any]]) -> Any:
        """Ask the process, and again if it dies meanwhile: `question` is called whenever it is to be sent.
        Raises ApiError 503 without an answer in time, and the ApiError with which the process refuses."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    await self._reachable.wait()
                    with contextlib.suppress(ConnectionError):
                        if self._link is not None:
                            return await question(self._link)
        except TimeoutError:
            message = f"Gateway process {self.index} gave no answer for {ANSWER_S:g} s."
            raise ApiError(503, message, retry_after_s=RETRY_AFTER_S) from None

    async def _start(self, runs: Mapping[str, ShardedRun], memory: Memory) -> GatewayLink:
        frames, their_frames = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with their_frames:
            inherited = their_frames.fileno(), self._listening.fileno()
            settings = Settings(self.index, self._options, self._key, *inherited)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sf_core.dataplane.sharding.process",
                stdin=asyncio.subprocess.PIPE,
                pass_fds=inherited,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(settings)).encode())
        self._process.stdin.close()
        self._lost.clear()
        link = GatewayLink(self.index, runs, memory, self._lose)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=frames)
        return link

    def _lose(self) -> None:
        self._link = None
        self._reachable.clear()
        self._lost.set()

    async def _reap(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class GatewayLink(Peer):
    """The hub's end of the connection to a gateway process, as long as that lives."""

    def __init__(
        self, index: int, runs: Mapping[str, ShardedRun], memory: Memory, on_lost: Callable[[], None]
    ) -> None:
        """`runs` are those of the hub, in whose memory the process is counted."""
        super().__init__(self._lose)
        self.handlers |= {"memory": self._take_memory, "counted": self._take_counted}
        self._index, self._runs, self._memory, self._note_lost = index, runs, memory, on_lost
        self._downlink = Downlink(self, runs.get)
        self.num_bytes = 0
        """Memory of the sessions in the process, in bytes, as it last reported."""
        memory.add(self)

    def tell_all(self) -> None:
        """Tell a new process which runs are open, before anything else, so that later messages find them."""
        self.tell("runs", *self._runs)
        self._opened = [self.ask_to_open(run) for run in self._runs.values()]

    def all_opened(self) -> asyncio.Future[Any]:
        """The answers to `tell_all`."""
        return asyncio.gather(*self._opened, return_exceptions=True)

    def ask_to_open(self, run: ShardedRun, delay_s: float = FIRST_DELAY_S) -> asyncio.Future[Any]:
        """Ask the process to serve the run as it is now, and again until it does or either is gone."""
        question = self.ask("run", *run.state_for(self._index))
        question.add_done_callback(lambda _: self._note_opened(run, question, delay_s))
        return question

    def _note_opened(self, run: ShardedRun, question: asyncio.Future[Any], delay_s: float) -> None:
        error = TimeoutError() if question.cancelled() else question.exception()
        if error is None:
            run.note_versions(question.result())
        elif not isinstance(error, ConnectionError) and not run.released:
            log.error("gateway process %d cannot serve %s: %s", self._index, run.spec.run_id, error)
            later = min(2 * delay_s, MAX_DELAY_S)
            asyncio.get_running_loop().call_later(delay_s, self.ask_to_open, run, later)

    def _take_memory(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory.weigh(self)

    def _take_counted(self, run_id: str, name: str, number: int) -> None:
        if (run := self._runs.get(run_id)) is not None:
            run.count(name, number)

    def _lose(self) -> None:
        self._memory.remove(self)
        self._downlink.close()
        self._note_lost()
