"""Our Prefect server, for `uvicorn --factory`: Prefect's own, whose 503 answers say when to retry. It takes
one report of each crash, and refuses pages of other origins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI
from prefect.server.api import server
from prefect.server.orchestration.core_policy import CoreFlowPolicy
from prefect.server.orchestration.dependencies import ORCHESTRATION_DEPENDENCIES
from prefect.server.orchestration.rules import FlowRunOrchestrationRule
from prefect.server.schemas.states import StateType
from prefect.settings import get_current_settings
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sf_core.own_addresses import UNNAMED, OwnAddresses
from sf_core.surroundings import allowed_hosts
from tasks.server import OURS

SOON_S, LATE_S = 0.1, 10.0
"""Bounds of Retry-After; a transaction on SQLite lasts some milliseconds, on a disk that is busy seconds."""


class RetrySoon:
    """Adds Retry-After to answers of status 503. On SQLite one of two simultaneous writers gets such an
    answer, and without the header Prefect's client retries only after two seconds. It gives up after five
    retries: while refusals follow each other, they name longer times, some eight seconds in all."""

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app, self._now = app, now
        self._first = self._last = 0.0
        """Times of the first and the last of the refusals that follow each other."""
        self._told_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                header = b"retry-after", f"{self._retry_after_s():.1f}".encode()
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, tell)

    def _retry_after_s(self) -> float:
        now = self._now()
        # or it is a new cause
        if now - self._last > 3 * self._told_s:
            self._first = now
        self._last, self._told_s = now, min(max(SOON_S, 2 * (now - self._first)), LATE_S)
        return self._told_s


class RefuseStrangers:
    """Refuses requests and websockets that a page of another origin makes a browser send, and those to a host
    that is none of ours, because a stranger's name may have been rebound to this machine. Browsers tell the
    host, the origin and the site of a request truthfully; other programs send neither origin nor site."""

    def __init__(self, app: ASGIApp, addresses: Iterable[str]) -> None:
        """`addresses` are HOST, HOST:PORT or URLs, as in the address bar of a browser. Pages from there may
        use this server, which also serves loopback and the IP address that it listens at."""
        self._app = app
        self._own = OwnAddresses(addresses)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def forbid_frames(message: Message) -> None:
            # a click into an invisible frame would press a button of the UI
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Frame-Options"] = "SAMEORIGIN"
            await send(message)

        refusal = None if scope["type"] == "lifespan" else self._why_refused(scope)
        if refusal is None:
            await self._app(scope, receive, forbid_frames)
        elif scope["type"] == "websocket":
            # uvicorn answers with 403; an answer with a body it would also log as a fault
            await send({"type": "websocket.close", "code": 1008, "reason": refusal})
        else:
            await JSONResponse({"detail": refusal}, 403)(scope, receive, send)

    def _why_refused(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        # a socket tells its IP address, and no name can be bound to that; Prefect calls itself by a name
        if (host := self._own.find_foreign_host(headers, str(scope["server"][0]))) is not None:
            return (
                f"this Prefect server does not serve the host {host!r}: use http://127.0.0.1 with its port, "
                "or start it with this host in the environment variable SF_ALLOWED_HOSTS"
            )
        origin = self._own.find_foreign_origin(headers)
        if origin is None or (origin == UNNAMED and _opens_a_page(scope, headers)):
            return None
        if origin == UNNAMED:
            return "pages of other origins may not use this Prefect server; they may link to pages of its UI"
        return (
            f"pages of {origin} may not use this Prefect server; if its UI has this address, start the "
            "server with the address in the environment variable SF_ALLOWED_HOSTS"
        )


def _opens_a_page(scope: Scope, headers: Headers) -> bool:
    """Whether somebody follows a link to the UI."""
    is_tab = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return is_tab and scope["method"] == "GET" and not scope["path"].startswith("/api/")


class RefuseSecondReport(FlowRunOrchestrationRule):
    """Refuses the second report of a crash. A process worker reports that a flow's process has died, starts
    another one, which imports the flow for its hooks, and then reports the same again. On a busy machine this
    takes a minute. The flow run has been restarted by then, and would be restarted once more beside that."""

    FROM_STATES = {StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING}  # noqa: RUF012
    TO_STATES = {StateType.CRASHED}  # noqa: RUF012

    async def before_transition(self, initial_state: Any, proposed_state: Any, context: Any) -> None:
        queue, said = context.run.work_queue, proposed_state.message or ""
        # workers of other pools report a crash only in this way
        is_ours = OURS in context.run.tags and queue is not None and queue.work_pool.type == "process"
        if is_ours and said.startswith("Flow run infrastructure exited with"):
            await self.abort_transition("The worker has reported this crash before.")


class FlowPolicy(CoreFlowPolicy):
    @staticmethod
    def priority() -> list[Any]:
        return [RefuseSecondReport, *CoreFlowPolicy.priority()]


async def _provide_policy() -> type[FlowPolicy]:
    return FlowPolicy


def create_app() -> FastAPI:
    ORCHESTRATION_DEPENDENCIES["flow_policy_provider"] = _provide_policy
    app = server.create_app(final=True)
    app.add_middleware(RetrySoon)
    settings = get_current_settings()
    origins = settings.server.api.cors_allowed_origins.split(",")
    urls = filter(None, (settings.api.url, settings.server.ui.api_url, *origins))
    app.add_middleware(RefuseStrangers, addresses=[*urls, *allowed_hosts()])
    return app
