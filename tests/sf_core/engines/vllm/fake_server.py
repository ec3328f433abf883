"""vLLM's routes without vLLM: its next token is a function of the ids so far and of its weights, or of the
adapter that a request names. An image's placeholder becomes one for every SIDE by SIDE pixels."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from aiohttp import web
from PIL import Image
from safetensors.numpy import load_file

from storage.tensors.weights import ADAPTER_NAME, FILE_NAME
from tests.bench.waits import patience

VOCABULARY = 60

PLACEHOLDER = VOCABULARY
SIDE = 28
"""The id of an image's placeholder, which is never sampled."""

CONTEXT = 320

_TOKEN_S = 0.0003

_COMMAND_S = 0.005


def next_token(ids: Sequence[int], version: int) -> int:
    """The token after these ids by the weights of this version, which are all this number."""
    return (31 * sum(ids) + 7 * len(ids) + 13 * version) % VOCABULARY


class FakeVllm:
    """What the server was asked, and what it does wrong."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        """The requests for tokens, in order, with the ids that they are expanded to."""
        self.num_forgotten = 0
        """Number of times that it forgot what it had made of images."""
        self.shown_at = 0
        """It shows images so many tokens behind their place."""
        self.wrong_name = ""
        """Sent in place of the name of the weights."""
        self.error: dict[str, Any] | None = None
        """Sent in place of tokens."""
        self.num_misses = 0
        """So many more requests with images it answers as if its core lacked one of them."""
        self.has_failed = False
        """It refuses to be paused."""
        self.is_dead = False
        """It says that it is not healthy."""
        self.aborts_by_itself = False
        self.never_ends = False
        """Streams stay open behind their last token."""
        self.late_s = 0.0
        """So long it does not know of a request that it was sent."""
        self.num_reloads = 0
        """Number of times that it began to take weights."""
        self.reload_s = _COMMAND_S
        self.refuses_adapters = False
        self.adapters: dict[str, int] = {}
        """Versions of the adapters by the names that requests may give."""
        self.most_adapters = 0
        """The most that there were at once."""
        self._version = 0
        self._name = ""
        self._running = asyncio.Event()
        self._aborted: dict[str, asyncio.Event] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._tell_health),
            web.post("/inference/v1/generate", self._generate),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/collective_rpc", self._reload),
            web.post("/update_weight_version", self._take_name),
            web.post("/abort_requests", self._abort),
            web.post("/reset_encoder_cache", self._forget),
            web.post("/v1/load_lora_adapter", self._load_adapter),
            web.post("/v1/unload_lora_adapter", self._unload_adapter),
        ]

    async def _tell_health(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if self.is_dead else 200)

    async def _answer(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_reloads += 1
        await asyncio.sleep(self.reload_s)
        if self.refuses_adapters or body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "no such adapter"}}, status=400)
        self.adapters[body["lora_name"]] = _read_version(f"{body['lora_path']}/{ADAPTER_NAME}")
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return await self._answer(request)

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        version = self.adapters.pop((await request.json())["lora_name"], None)
        return web.json_response({}, status=404 if version is None else 200)

    async def _pause(self, request: web.Request) -> web.Response:
        if self.has_failed:
            raise web.HTTPServiceUnavailable
        self._running.clear()
        await asyncio.sleep(_COMMAND_S)
        if request.query["mode"] == "abort":
            for aborted in self._aborted.values():
                aborted.set()
        return await self._answer(request)

    async def _resume(self, request: web.Request) -> web.Response:
        self._running.set()
        return await self._answer(request)

    async def _reload(self, request: web.Request) -> web.Response:
        self.num_reloads += 1
        await asyncio.sleep(self.reload_s)
        folder = (await request.json())["kwargs"]["weights_path"]
        self._version = _read_version(f"{folder}/{FILE_NAME}")
        return await self._answer(request)

    async def _forget(self, request: web.Request) -> web.Response:
        if self._running.is_set():
            raise web.HTTPConflict
        self.num_forgotten += 1
        return await self._answer(request)

    async def _take_name(self, request: web.Request) -> web.Response:
        self._name = (await request.json())["new_version"]
        return await self._answer(request)

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            if name in self._aborted:
                self._aborted[name].set()
        return await self._answer(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, ranges = _expand(body["token_ids"], body.get("content_parts", []))
        body["token_ids"] = prompt
        told = {"prompt_token_ids": prompt, "mm_placeholders": {"image": ranges}} if ranges else {}
        for place in ranges:
            place["offset"] += self.shown_at
        self.bodies.append(body)
        if "model" in body and body["model"] not in self.adapters:
            raise web.HTTPNotFound
        # one that is unloaded samples its requests to their ends
        adapter = self.adapters.get(body.get("model"))
        await asyncio.sleep(self.late_s)
        name = f"generate-tokens-{body['request_id']}"
        settings = body["sampling_params"]
        aborted = self._aborted[name] = asyncio.Event()
        response = web.StreamResponse()
        await response.prepare(request)
        ids = list(body["token_ids"])
        unsent = list[int]()
        names = set[str]()
        finish = None
        try:
            if ranges and self.num_misses:
                self.num_misses -= 1
                await _send(response, {"error": {"code": 500, "message": "Internal server error"}})
                return response
            if self.error is not None:
                await _send(response, self.error)
                return response
            while finish is None:
                await asyncio.sleep(_TOKEN_S)
                if aborted.is_set() or (self.aborts_by_itself and len(ids) > len(body["token_ids"])):
                    finish = "abort"
                elif self._running.is_set():
                    names.add(self.wrong_name or self._name)
                    ids.append(next_token(ids, self._version if adapter is None else adapter))
                    unsent.append(ids[-1])
                    is_full = len(ids) - len(body["token_ids"]) == settings["max_tokens"]
                    stops = ids[-1] in settings["stop_token_ids"]
                    finish = "stop" if stops else "length" if is_full else None
                if unsent and len(unsent) >= settings["stream_interval"] and finish is None:
                    await _send(response, _piece(unsent) | told)
                    unsent.clear()
                    told = {}
            await _send(response, _piece(unsent, finish, names) | told)
            while self.never_ends and request.transport is not None:
                await asyncio.sleep(0.01)
        finally:
            del self._aborted[name]
        return response


def _read_version(file: str) -> int:
    """The number that all weights of a file are."""
    [weights] = load_file(file).values()
    return int(weights.max())


def _expand(ids: Sequence[int], parts: Sequence[Any]) -> tuple[list[int], list[dict[str, int]]]:
    """The ids with all placeholders of these images, and where those are."""
    expanded = list[int]()
    ranges = list[dict[str, int]]()
    left = [*parts]
    for token in ids:
        length = 1
        if token == PLACEHOLDER and left:
            with Image.open(url2pathname(urlsplit(left.pop(0)["url"]).path)) as image:
                length = (image.width // SIDE) * (image.height // SIDE)
            ranges.append({"offset": len(expanded), "length": length})
        expanded += [token] * length
    return expanded, ranges


def _piece(ids: Sequence[int], finish: str | None = None, names: Sequence[str] | set[str] = ()) -> Any:
    content = [{"logprob": -0.5} for _ in ids]
    spans = [{"version": name, "start": 0, "end": 0} for name in names]
    choice = {"token_ids": [*ids], "logprobs": {"content": content}, "finish_reason": finish}
    return {"choices": [choice | {"weight_versions": spans}]}


async def _send(response: web.StreamResponse, message: Any) -> None:
    await response.write(f"data: {json.dumps(message)}\n\n".encode())


@contextmanager
def fake_vllm() -> Iterator[FakeVllm]:
    """A server on loopback."""
    loop = asyncio.new_event_loop()
    fake = FakeVllm()

    async def begin() -> web.AppRunner:
        application = web.Application()
        application.add_routes(fake.routes())
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.url = "http://{}:{}".format(*runner.addresses[0])
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(begin(), loop).result(patience())
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(patience())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
