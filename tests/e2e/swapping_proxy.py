"""A server before a vLLM server, which gives it another picture for each that a request shows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp import web
from PIL import Image, ImageOps

_CHUNK = 2**16


@contextmanager
def swapping_proxy(socket: str) -> Iterator[str]:
    """The URL of the proxy of the server at a Unix socket."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket, force_close=True)
        ) as session:

            async def forward(request: web.Request) -> web.StreamResponse:
                body = _swap(await request.read())
                timeout = aiohttp.ClientTimeout(total=None)
                target = f"http://vllm{request.path_qs}"
                kind = {"Content-Type": request.content_type}
                asked = session.request(request.method, target, data=body, headers=kind, timeout=timeout)
                try:
                    answering = await asked
                except aiohttp.ClientConnectionError:
                    # it is starting
                    return web.Response(status=503)
                async with answering as answer:
                    response = web.StreamResponse(status=answer.status)
                    response.content_type = answer.content_type
                    await response.prepare(request)
                    async for chunk in answer.content.iter_chunked(_CHUNK):
                        await response.write(chunk)
                    await response.write_eof()
                    return response

            app = web.Application()
            app.router.add_route("*", "/{path:.*}", forward)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])
            ready.set()
            await asyncio.Event().wait()

    serving = loop.create_task(serve())
    thread = threading.Thread(target=lambda: _run(loop, serving), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(30)


def _run(loop: asyncio.AbstractEventLoop, serving: asyncio.Task[None]) -> None:
    try:
        loop.run_until_complete(serving)
    except asyncio.CancelledError:
        loop.close()


def _swap(body: bytes) -> bytes:
    if b"content_parts" not in body:
        return body
    asked = orjson.loads(body)
    asked["content_parts"] = [_swap_part(part) for part in asked["content_parts"]]
    return orjson.dumps(asked)


def _swap_part(part: dict[str, Any]) -> dict[str, Any]:
    """The same picture in other colours, in a file beside it: as many tokens in the same places."""
    path = Path(urlsplit(part["url"]).path)
    other = path.with_name(f"other-{path.name}")
    if not other.exists():
        ImageOps.invert(Image.open(path)).save(other)
    return part | {"url": other.as_uri(), "uuid": f"other-{part['uuid']}"}
