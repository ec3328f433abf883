"""A Prefect server of ours, for `uvicorn --factory`: Prefect's own, which says when to ask again."""

from __future__ import annotations

from fastapi import FastAPI
from prefect.server.api import server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_S = b"0.1"
"""A transaction on SQLite lasts some milliseconds."""


class RetrySoon:
    """Adds Retry-After to answers of status 503. On SQLite one of two that write at the same moment gets it,
    and Prefect's client, if it is not told, asks again only after two seconds."""

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
