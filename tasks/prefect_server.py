"""Our Prefect server, for `uvicorn --factory`: Prefect's own, whose 503 answers say when to retry."""

from __future__ import annotations

from fastapi import FastAPI
from prefect.server.api import server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_S = b"0.1"
"""Seconds; a transaction on SQLite lasts some milliseconds."""


class RetrySoon:
    """Adds Retry-After to answers of status 503. On SQLite one of two simultaneous writers gets such an
    answer, and without the header Prefect's client retries only after two seconds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                message["headers"] = [*message["headers"], (b"retry-after", RETRY_AFTER_S)]
            await send(message)

        await self._app(scope, receive, tell)


def create_app() -> FastAPI:
    app = server.create_app(final=True)
    app.add_middleware(RetrySoon)
    return app
