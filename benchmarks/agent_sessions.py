"""Processes of benchmarks/agent_clients.py: sessions of `speller`, and a model that answers at once."""

from __future__ import annotations

import asyncio
import sys
import time

from aiohttp import web

from sf_core.agents.authorities import read_authorities_lazily
from sf_core.types import Endpoint

AT_ONCE = 64


def serve(port: int) -> None:
    message = {"role": "assistant", "content": "hello"}
    answer = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
    }

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


async def measure(url: str, number: int) -> float:
    """CPU time in ms per session."""
    import speller  # type: ignore[import-not-found]

    places = asyncio.Semaphore(AT_ONCE)

    async def work(index: int) -> None:
        async with places:
            await speller.agent(speller.tasks("train", index), Endpoint(url, f"key-{index}", "policy"))

    await work(0)  # imports
    begun = time.process_time()
    await asyncio.gather(*(work(index) for index in range(number)))
    return (time.process_time() - begun) / number * 1000


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(int(sys.argv[1]))
    else:
        read_authorities_lazily()
        print(round(asyncio.run(measure(sys.argv[1], int(sys.argv[2]))), 2))
