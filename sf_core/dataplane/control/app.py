"""The data plane as an ASGI application: its routes, its middleware, and what runs while it is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from sf_core.dataplane.control.control_route import ControlRoute
from sf_core.dataplane.control.engine_socket import serve_engine_link
from sf_core.dataplane.control.metrics import MemoryUse, Runs, together
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.control.routes import CONTROL_ROUTES
from sf_core.dataplane.gateway.agent_routes import REFUSALS, agent_routes
from sf_core.dataplane.gateway.keys import KeyCheck
from sf_core.dataplane.gateway.metrics import Metrics
from sf_core.dataplane.gateway.observed import Observed
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.recovery import MakeRun
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.memory import Memory


class Shards(Protocol):
    """Further processes that serve the turns of runs; see sharding."""

    @property
    def make_run(self) -> MakeRun:
        """Makes a run whose turns they serve."""

    def forwarding(self) -> Middleware:
        """Middleware that forwards agents' requests to the process that serves their session."""

    def running(self, runs: Mapping[str, ServedRun], memory: Memory) -> AbstractAsyncContextManager[None]:
        """Context in which the processes are kept alive and serve these runs, at first those that an earlier
        data plane served; their sessions are counted in this memory."""

    async def figures(self) -> dict[str, bytes]:
        """Prometheus texts by process."""


DEFAULTS = DataplaneOptions()


def make_app(
    key: str | None = None,
    options: DataplaneOptions = DEFAULTS,
    shards: Shards | None = None,
) -> Starlette:
    """The ASGI application; without `shards` it serves turns itself. Raises ValueError if another data plane
    uses the journal directory."""
    make_run = ServedRun if shards is None else shards.make_run
    plane = DataPlane(options, make_run)
    metrics = Metrics(Runs(plane.runs), MemoryUse(plane.memory))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await plane.reopen()
        async with contextlib.nullcontext() if shards is None else shards.running(plane.runs, plane.memory):
            sweeping = asyncio.ensure_future(plane.sweep())
            yield
            sweeping.cancel()
        await plane.close()

    async def engines(socket: WebSocket) -> None:
        await serve_engine_link(socket, plane.runs.get)

    async def figures() -> Response:
        text = metrics.text()
        if shards is not None:
            text = together({"hub": text, **await shards.figures()})
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    middleware = [
        Middleware(Observed, metrics=metrics),
        Middleware(KeyCheck, key=key, runs=plane.runs.values),
    ]
    if shards is not None:
        middleware.insert(0, shards.forwarding())

    app = Starlette(
        routes=[
            *agent_routes(plane.sessions),
            *CONTROL_ROUTES,
            ControlRoute("GET", "/metrics", "Figures for Prometheus.", figures, answers="text/plain"),
            WebSocketRoute("/engines", engines),
        ],
        middleware=middleware,
        exception_handlers=REFUSALS,
        lifespan=lifespan,
    )
    app.state.plane = plane
    return app
