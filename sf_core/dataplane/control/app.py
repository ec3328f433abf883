"""The data plane as an ASGI application: its routes, its middleware, and what runs while it is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from sf_core.config.addresses import OwnAddresses
from sf_core.dataplane.control.control_route import ControlRoute
from sf_core.dataplane.control.engine_socket import serve_connection
from sf_core.dataplane.control.metrics import PlaneMetrics
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.control.routes import router
from sf_core.dataplane.gateway.access import KeyMiddleware, Keys
from sf_core.dataplane.gateway.agent_routes import REFUSALS, agent_routes
from sf_core.dataplane.gateway.observed import Metrics, ObservationMiddleware
from sf_core.dataplane.options import DataplaneOptions

DEFAULTS = DataplaneOptions()


def make_app(
    key: str, options: DataplaneOptions = DEFAULTS, *, welcomes_strangers: bool = False
) -> Starlette:
    """The ASGI application. `key` is the operator's. If it `welcomes_strangers`, senders without a valid key
    are clients of the runs without a key. Raises ValueError if another data plane uses the journal
    directory."""
    plane = DataPlane(options)
    keys = Keys(key, welcomes_strangers, OwnAddresses(options.allowed_hosts))
    metrics = Metrics(PlaneMetrics(plane.runs, plane.memory))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await plane.reopen()
        sweeping = asyncio.ensure_future(plane.sweep())
        yield
        sweeping.cancel()
        await plane.close()

    async def engines(socket: WebSocket) -> None:
        await serve_connection(socket, plane.runs.get)

    async def figures() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            *agent_routes(plane.sessions),
            *router.routes,
            ControlRoute("GET", "/metrics", "Figures for Prometheus.", figures, media_type="text/plain"),
            WebSocketRoute("/engines", engines),
        ],
        middleware=[
            Middleware(ObservationMiddleware, metrics=metrics),
            Middleware(KeyMiddleware, keys=keys, specs=lambda: [run.spec for run in plane.runs.values()]),
        ],
        exception_handlers=REFUSALS,
        lifespan=lifespan,
    )
    app.state.plane = plane
    return app
