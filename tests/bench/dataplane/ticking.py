"""`python -m tests.bench.dataplane.ticking`: a data plane that tells how much CPU its process used between
two ticks of its event loop, in all threads together.

`GET /ticks` answers with the most of them since the last such request. The loop ticks each millisecond."""

from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from sf_core.cli.main import main
from sf_core.dataplane import server

TICK_S = 0.001


def read_rss() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


class Ticking:
    """An ASGI application with the route `/ticks`, which also tells the memory of the process, in bytes."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.state = app.state
        self.routes = app.routes
        self._most_s = 0.0
        self._ticks: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != "/ticks":
            return await self._app(scope, receive, send)
        if self._ticks is None:
            self._ticks = asyncio.ensure_future(self._tick())
        await asyncio.sleep(0.02)  # so that the last span has ended
        most_s = self._most_s
        self._most_s = 0.0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": orjson.dumps([most_s, read_rss()])})

    async def _tick(self) -> None:
        last_s = time.process_time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.process_time()
            self._most_s = max(self._most_s, now_s - last_s)
            last_s = now_s


if __name__ == "__main__":
    make_app = server.make_app
    server.make_app = lambda *given, **named: Ticking(make_app(*given, **named))  # type: ignore
    main()
