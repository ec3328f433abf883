"""Our Prefect server, for `uvicorn --factory`: Prefect's own, whose 503 answers say when to retry."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI
from prefect.server.api import server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def create_app() -> FastAPI:
    app = server.create_app(final=True)
    app.add_middleware(RetrySoon)
    return app
