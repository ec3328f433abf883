"""The data plane's end of an engine's connection.

Owns the handshake, which turns away stale engines, and the transfer of frames through a bounded queue. An
engine is stale if it belongs to an earlier attempt of the flow, a released run, a revoked lease, or a start
of its lease with a lower epoch than another that has said hello. Dask starts a lease again when it takes its
worker for dead; the scheduler numbers the starts as it makes them, so that the order of hellos does not
matter. The same epoch is the same start, whose connection broke. Routing is in router.py. WebSocket pings,
answered independently of the work at both ends, detect dead machines and networks (http_protocol.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from starlette.websockets import WebSocket, WebSocketDisconnect

from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.runs.run import ServedRun
from sf_core.engines import wire

log = logging.getLogger(__name__)

MAX_OUTBOX_BYTES = 64 * 2**20
"""Bytes that may wait for a slow engine; with more it is dropped, and others continue its requests."""


class Outbox:
    """Bounded queue of frames to one engine."""

    def __init__(self, max_bytes: int, on_full: Callable[[], None]) -> None:
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._on_full = on_full

    def put(self, frame: bytes) -> None:
        if self._num_bytes + len(frame) > self._max_bytes:
            return self._on_full()
        self._num_bytes += len(frame)
        self._frames.put_nowait(frame)

    async def get(self) -> bytes:
        frame = await self._frames.get()
        self._num_bytes -= len(frame)
        return frame


async def serve_connection(socket: WebSocket, find_run: Callable[[str], ServedRun | None]) -> None:
    await socket.accept()
    try:
        hello = wire.read_from_engine(await _receive(socket))
    except (WebSocketDisconnect, ValueError):
        hello = None
    if not isinstance(hello, wire.Hello):
        return await socket.close(wire.BAD_FRAME, "the engine sent no hello frame")
    run = find_run(hello.run_id)
    if run is None:
        return await socket.close(wire.UNKNOWN_RUN, f"run {hello.run_id} is not registered")
    if (reason := _admit(run, hello)) is not None:
        await socket.send_bytes(wire.pack(wire.Yield(reason)))
        return await socket.close()
    for former in [engine for engine in run.router.engines if engine.lease_id == hello.lease_id]:
        # a newer start, or the same one, whose process goes on: no request has ended it
        run.router.disconnect(former, None)
    await _serve(socket, run, hello)


def _admit(run: ServedRun, hello: wire.Hello) -> str | None:
    """Note the epoch of an engine that may serve; why another one must not."""
    if hello.attempt < run.spec.attempt:
        return "superseded by a later attempt of the flow"
    if hello.lease_id in run.state.revoked_leases:
        return "revoked"
    if run.released:
        return "released"
    latest = run.lease_epochs.get(hello.lease_id, hello.epoch)
    if hello.epoch < latest:
        return "superseded by a later start of the same lease"
    run.lease_epochs[hello.lease_id] = hello.epoch
    return None


async def _serve(socket: WebSocket, run: ServedRun, hello: wire.Hello) -> None:
    disconnected = asyncio.Event()
    outbox = Outbox(MAX_OUTBOX_BYTES, disconnected.set)
    engine = EngineConnection(
        hello.engine_id,
        hello.lease_id,
        hello.worker,
        hello.attempt,
        hello.max_running,
        outbox.put,
        disconnected=disconnected,
    )
    run.router.add(engine)
    writer = asyncio.ensure_future(_write(socket, run, outbox))
    reader = asyncio.ensure_future(_read(socket, run, engine))
    fenced = asyncio.ensure_future(engine.disconnected.wait())
    try:
        await asyncio.wait([writer, reader, fenced], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (writer, reader, fenced):
            task.cancel()
        results = await asyncio.gather(writer, reader, return_exceptions=True)
        run.router.disconnect(engine, _say_end(results))
        run.changed.notify()
    unexpected = [r for r in results if isinstance(r, Exception) and not isinstance(r, WebSocketDisconnect)]
    if not unexpected:
        await _close(socket, 1000)
    elif isinstance(unexpected[0], ValueError):
        log.error("engine %s is dropped: %s", engine.engine_id, unexpected[0])
        await _close(socket, wire.BAD_FRAME, str(unexpected[0]))
    else:
        await _close(socket, 1011)
        raise unexpected[0]


def _say_end(results: Sequence[object]) -> str:
    """How a connection ended, as a predicate whose subject is the engine."""
    reasons = [
        r.reason for r in results if isinstance(r, WebSocketDisconnect) and r.code == wire.ENGINE_FAILED
    ]
    return f"failed ({reasons[0]})" if reasons else "ended"


async def _write(socket: WebSocket, run: ServedRun, outbox: Outbox) -> None:
    while True:
        frame = await outbox.get()
        run.router.bytes_to_engines += len(frame)
        await socket.send_bytes(frame)


async def _read(socket: WebSocket, run: ServedRun, engine: EngineConnection) -> None:
    while True:
        frame = await _receive(socket)
        run.router.bytes_from_engines += len(frame)
        match wire.read_from_engine(frame):
            case wire.Chunks(chunks):
                run.meter.add(run.router.receive(engine, chunks))
            case wire.Updated(version):
                run.router.confirm(engine, version)
                run.changed.notify()
            case wire.Refused(version, reason):
                run.router.refuse(engine, version, reason)
            case wire.EnginePaused():
                run.router.confirm_pause(engine)
            case wire.Yielded():
                return
            case wire.Hello():
                raise ValueError("the engine sent a second hello frame")


async def _receive(socket: WebSocket) -> bytes:
    """The next frame. Raises ValueError for text, and WebSocketDisconnect."""
    try:
        return await socket.receive_bytes()
    except KeyError:
        raise ValueError("the engine sent text") from None


async def _close(socket: WebSocket, code: int, reason: str = "") -> None:
    try:
        await socket.close(code, wire.fit_reason(reason))
    except (RuntimeError, WebSocketDisconnect):
        return  # the other end closed it first
