"""Our Prefect server, for `uvicorn --factory`: Prefect's own, which repeats a request that met a locked
database. It takes one report of each crash, and refuses pages of other origins."""

from __future__ import annotations

import asyncio
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

from sf_core.config.addresses import UNNAMED, OwnAddresses
from sf_core.process.environment_variables import allowed_hosts
from tasks.server import OURS

SOON_S = 0.1
LATE_S = 10.0
"""Bounds of Retry-After; a transaction on SQLite lasts some milliseconds, on a disk that is busy seconds."""


class RetryAfterMiddleware:
    """Adds Retry-After to answers of status 503. On SQLite one of two simultaneous writers gets such an
    answer, and without the header Prefect's client retries only after two seconds. It gives up after five
    retries: while refusals follow each other, they name longer times, some eight seconds in all."""

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._first = self._last = 0.0
        """Times of the first and the last of the refusals that follow each other."""
        self._told_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                header = b"retry-after", f"{self._retry_after_s():.1f}".encode()
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, send_once)

    def _retry_after_s(self) -> float:
        now = self._now()
        # or it is a new cause
        if now - self._last > 3 * self._told_s:
            self._first = now
        self._last = now
        self._told_s = min(max(SOON_S, 2 * (now - self._first)), LATE_S)
        return self._told_s


AGAIN_S = 20.0
PAUSE_S = 0.2
"""Longest time for which a request is repeated, and the pause before it is."""

MOST_BYTES = 2**20
"""Size of the largest request that is repeated, because it must be kept."""

LOCKED = (
    f"the database of the Prefect server is still busy after {AGAIN_S:g} s, and nothing was changed: repeat "
    "the request; if this happens often, use PostgreSQL (PREFECT_API_DATABASE_CONNECTION_URL)"
)


class RepeatRefused:
    """Repeats a request that changes something and is answered by status 503, which Prefect's server gives to
    one of two simultaneous writers of SQLite after it has undone all changes. Browsers do not repeat such a
    request. After AGAIN_S the answer says so in words."""

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            return await self._app(scope, receive, send)
        body, is_whole = await _read_body(receive)
        if not is_whole:
            return await self._app(scope, _follow(body, receive, more=True), send)
        until = self._now() + AGAIN_S
        # what the application notes in the scope belongs to one try
        while await self._is_refused({**scope}, _follow(body, receive), send):
            if self._now() > until:
                return await JSONResponse({"detail": LOCKED, "exception_message": LOCKED}, 503)(
                    scope, receive, send
                )
            await asyncio.sleep(PAUSE_S)

    async def _is_refused(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the answer is 503, which is not sent then."""
        is_refused = False

        async def filter_answer(message: Message) -> None:
            nonlocal is_refused
            if message["type"] == "http.response.start":
                is_refused = message["status"] == 503
            if not is_refused:
                await send(message)

        try:
            await self._app(scope, receive, filter_answer)
        except Exception:
            # Starlette raises the error of the database again, after the answer
            if not is_refused:
                raise
        return is_refused


async def _read_body(receive: Receive) -> tuple[bytes, bool]:
    """The body of a request, and whether it is complete. A longer one than MOST_BYTES is not."""
    body = b""
    while len(body) <= MOST_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body, message["type"] == "http.request"
    return body, False


def _follow(body: bytes, receive: Receive, *, more: bool = False) -> Receive:
    """Delivers the body that was read, then what `receive` does."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": more}]

    async def deliver() -> Message:
        return first.pop() if first else await receive()

    return deliver


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
        queue = context.run.work_queue
        message = proposed_state.message or ""
        # workers of other pools report a crash only in this way
        is_ours = OURS in context.run.tags and queue is not None and queue.work_pool.type == "process"
        if is_ours and message.startswith("Flow run infrastructure exited with"):
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
    app.add_middleware(RepeatRefused)
    app.add_middleware(RetryAfterMiddleware)
    settings = get_current_settings()
    origins = settings.server.api.cors_allowed_origins.split(",")
    urls = filter(None, (settings.api.url, settings.server.ui.api_url, *origins))
    app.add_middleware(RefuseStrangers, addresses=[*urls, *allowed_hosts()])
    return app
