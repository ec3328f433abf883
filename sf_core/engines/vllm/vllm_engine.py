"""vLLM as an engine that samples by itself, in processes of its own. This module has what
runs on its event loop: streams, updates of weights, and the start and end of the server.

Every request to vLLM is sampled by one version: an update ends all streams, has the server sample by the new
version (weight_loading.py), and sends what is left of each request again. vLLM's own name of the weights must
agree at the end of each.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from sf_core.engines.drivers.driver import describe_error
from sf_core.engines.grammar import Vocabularies
from sf_core.engines.protocol import EngineLostError, Event, WeightsRefusedError, check_request
from sf_core.engines.vllm.client import RequestRefusedError, VllmClient, VllmTurn
from sf_core.engines.vllm.images import MultimodalRequests
from sf_core.engines.vllm.server import EngineServer
from sf_core.engines.vllm.weight_loading import WeightLoading
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef

log = logging.getLogger(__name__)

_STREAM_END_TIMEOUT_S = 10.0
"""Longest wait for the end of a stream that vLLM was told to end."""

_UNANSWERED_TIMEOUT_S = 0.1
"""Longest wait for the end of a stream that has brought no token: vLLM may have been told to end the
request before it knew the request."""

_MAX_FAILED_STARTS = 3
"""Number of failed starts in a row after which the engine fails."""


class VllmEngine:
    """An engine of one server. At rest a server on the CPU keeps its memory; one on a GPU sleeps,
    or ends if it is given adapters. Its methods report errors as events and do not raise them."""

    def __init__(
        self,
        server: EngineServer,
        weight_loading: WeightLoading,
        vocab_size: int,
        context_length: int,
        keep_kv: bool,
        vocabularies: Vocabularies | None,
        images: MultimodalRequests | None,
    ) -> None:
        """`vocabularies` are what answers with grammars are made of; None: the server follows no grammars.
        `images`: None: the policy does not see."""
        self.loop = asyncio.new_event_loop()
        self.emit: Callable[[Event], None] = lambda event: None
        self._server = server
        self._weight_loading = weight_loading
        self._keep_kv = keep_kv
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._vocabularies = vocabularies
        self._multimodal = images
        # one thread, because only one fetch at a time may use the copy of the weights
        self._fetch_executor = ThreadPoolExecutor(1, "fetch-weights")
        self._client: VllmClient | None = None
        self._turns: dict[str, VllmTurn] = {}
        self._streaming: set[VllmTurn] = set()
        """Turns that have a stream, also those that are being aborted."""
        self._engine_name = uuid.uuid4().hex[:12]
        """Part of the names of our requests and weights, so that nobody else's are taken for them."""
        self._numbers = itertools.count()
        self._weights_label = ""
        """Name that the server has for the weights that sample now."""
        self._wanted_weights: WeightsRef | None = None
        self._reported_weights: WeightsRef | None = None
        """Weights that the driver was told of; None at rest."""
        self._server_weights: WeightsRef | None = None
        """Weights that the server samples by when it is resumed, also at rest."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that run between the calls of the driver."""
        self._update_task: asyncio.Task[None] | None = None
        self._server_lock = asyncio.Lock()
        """Locked while the server is paused, resumed or given weights."""
        self._is_paused = False
        self._is_asleep = False
        self._is_sampling = False
        self._lacks_weights = False
        """Whether the server was stopped for weights that it was not given, because newer ones came."""
        self._failed_starts = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        return len(self._turns)

    def update_weights(self, weights: WeightsRef) -> None:
        self._wanted_weights = weights
        if self._update_task is None or self._update_task.done():
            self._update_task = self._start_task(self._update_weights())

    def submit(self, request: GenerationRequest) -> None:
        # checked before the stream begins, because vLLM would report it in the middle of the stream
        check_request(
            request, self._context_length, self._vocab_size, is_multimodal=self._multimodal is not None
        )
        if self._multimodal is not None:
            self._multimodal.check(request)
        if request.request_id in self._turns:
            raise ValueError(f"request {request.request_id!r} is already running")
        if request.grammar:
            # without vocabularies the grammar would end the server
            if self._vocabularies is None:
                raise ValueError("a grammar was given, but this server does not support grammars")
            self._vocabularies.of(request.stop_token_ids).begin(request.grammar)
        turn = self._turns[request.request_id] = VllmTurn(request, self._weights_label)
        if self._is_sampling:
            self._open_stream(turn)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        names = [*self._turns] if request_ids is None else self._turns.keys() & request_ids
        turns = [self._turns.pop(name) for name in names]
        ids = [turn.vllm_request_id for turn in turns if turn.stream]
        if self._client is not None and ids:
            try:
                await self._end_streams(turns, self._client.abort(ids))
            except EngineLostError as error:
                return self._handle_loss(error)
        version = 0 if self._reported_weights is None else self._reported_weights.version
        for turn in turns:
            if not turn.has_ended:
                self.emit(Chunk(turn.request.request_id, [], [], version, FinishReason.ABORT))

    async def pause(self) -> None:
        self._is_paused = True
        async with self._exclusive():
            if self._client is not None and self._is_sampling:
                self._is_sampling = False
                await self._client.pause("keep")

    async def resume(self) -> None:
        self._is_paused = False
        async with self._exclusive():
            has_weights = self._reported_weights is not None and not self._lacks_weights
            if self._client is not None and has_weights and not self._is_sampling:
                await self._resume_sampling(self._client)

    async def rest(self) -> None:
        self._wanted_weights = None
        if self._update_task is not None:
            self._update_task.cancel()
            self._update_task = None
        async with self._exclusive():
            self._turns.clear()
            self._reported_weights = None
            self._is_sampling = False
            if self._client is None:
                return self._server.cancel_start()
            await self._end_streams(self._streaming, self._client.pause("abort"))
            if self._server.stops_at_rest:
                self._reset()
            elif self._server.sleep_level and not self._is_asleep:
                await self._client.sleep(self._server.sleep_level)
                self._is_asleep = True
                if self._server.sleep_level == 2:
                    self._server_weights = None

    def close(self) -> None:
        self.loop.run_until_complete(self._end_tasks())
        self._fetch_executor.shutdown(cancel_futures=True)
        self.loop.close()
        self._weight_loading.close()

    async def _update_weights(self) -> None:
        """Have the wanted weights fetched and given to the server."""
        while (weights := self._wanted_weights) is not None and (
            weights != self._reported_weights or self._lacks_weights
        ):
            try:
                folder = await asyncio.get_running_loop().run_in_executor(
                    self._fetch_executor, self._weight_loading.fetch, weights
                )
                if weights != self._wanted_weights:
                    continue
                if self._client is None:
                    await self._connect(weights)
                await self._load(weights, folder)
            except EngineLostError as error:
                return self._handle_loss(error)
            except (ValueError, OSError) as error:
                if weights != self._wanted_weights:
                    continue
                self.emit(error if self._reported_weights is None else WeightsRefusedError(str(error)))
                self._wanted_weights = None
                if self._reported_weights is None or self._server_weights is None or not self._lacks_weights:
                    return
                # fall back to the previous weights
                self._wanted_weights = weights = self._server_weights
                folder = ""
            # by a task of its own, so that rest, which cancels this one, never leaves the server half-way
            switch = self._start_task(self._switch_weights(weights, folder))
            await asyncio.wait([switch])
            if switch.exception():
                return

    async def _connect(self, weights: WeightsRef) -> None:
        self._client, is_new = await self._server.connect()
        self._server_weights = weights if is_new and self._weight_loading.is_in_start else None
        self._start_task(self._watch(self._client))

    async def _load(self, weights: WeightsRef, source: str) -> None:
        async with self._exclusive():
            if self._client is not None and self._server_weights != weights:
                await self._weight_loading.load(self._client, weights, source)

    async def _switch_weights(self, weights: WeightsRef, source: str) -> None:
        async with self._exclusive():
            client = self._client
            if client is None or weights != self._wanted_weights:
                return
            self._is_sampling = False
            self._lacks_weights = True
            await self._end_streams(self._streaming, client.pause("abort"))
            if self._is_asleep:
                await client.wake_up("weights")
            if self._server_weights != weights:
                self._server_weights = None
                await self._weight_loading.switch(client, weights, source)
                self._server_weights = weights
            if self._is_asleep:
                await client.wake_up("kv_cache")
                await client.reset_prefix_cache()
                self._is_asleep = False
            if self._multimodal is not None:
                await client.reset_encoder_cache()
            if weights != self._wanted_weights:
                # superseded by newer weights, or the engine was put to rest
                return
            self._weights_label = f"{self._engine_name}.{weights.version}"
            await client.set_weight_version(self._weights_label)
            self._reported_weights = weights
            self._lacks_weights = False
            self._failed_starts = 0
            self.emit(weights)
            if not self._is_paused:
                await self._resume_sampling(client)
            await self._weight_loading.unload_others(client)

    async def _resume_sampling(self, client: VllmClient) -> None:
        await client.resume()
        self._is_sampling = True
        for turn in self._turns.values():
            if turn.stream is None:
                if not self._keep_kv:
                    turn.salt = self._weights_label
                self._open_stream(turn)

    def _open_stream(self, turn: VllmTurn) -> None:
        assert self._client is not None and self._reported_weights is not None
        body = turn.body(f"{self._engine_name}.{next(self._numbers)}", self._weight_loading.model)
        turn.stream = self._start_task(self._sample(turn, body, self._client, self._reported_weights.version))
        self._streaming.add(turn)

    async def _sample(self, turn: VllmTurn, body: dict[str, Any], client: VllmClient, version: int) -> None:
        name = turn.request.request_id
        label = self._weights_label
        reason = None
        try:
            if self._multimodal is None:
                pieces = client.generate(body)
            else:
                pieces = self._multimodal.generate(client, body, turn.request.images)
            async for delta in pieces:
                if delta.labels - {label}:
                    raise EngineLostError(f"vLLM used weights {set(delta.labels)}; expected {label}")
                finish = turn.append(delta)
                reason = delta.finish_reason
                if turn.has_ended:
                    self._turns.pop(name, None)
                for chunk in turn.chunks(delta, version, finish):
                    self.emit(chunk)
            if reason is None or (reason == "abort" and self._is_sampling and name in self._turns):
                raise EngineLostError("vLLM ended a request that was not cancelled")
        except EngineLostError as error:
            self._handle_loss(error)
        except Exception as error:
            log.error("%s", error, exc_info=not isinstance(error, RequestRefusedError))
            turn.has_ended = True
            self._turns.pop(name, None)
            self.emit(Chunk.failed(name, version, describe_error(error)))
        finally:
            turn.stream = None
            self._streaming.discard(turn)

    async def _end_streams(self, turns: Collection[VllmTurn], command: Awaitable[None]) -> None:
        """Give the command that ends these streams, and wait until they have."""
        turns = list(turns)
        unanswered = [turn.stream for turn in turns if turn.stream and not turn.has_answered]
        await command
        if not (streams := [turn.stream for turn in turns if turn.stream]):
            return
        await asyncio.wait(streams, timeout=_UNANSWERED_TIMEOUT_S)
        for stream in unanswered:
            stream.cancel()
        _, unfinished = await asyncio.wait(streams, timeout=_STREAM_END_TIMEOUT_S)
        if unfinished:
            raise EngineLostError(
                f"vLLM did not stop {len(unfinished)} requests within {_STREAM_END_TIMEOUT_S:.0f} s"
            )

    async def _watch(self, client: VllmClient) -> None:
        try:
            await self._server.watch(client)
        except EngineLostError as error:
            self._handle_loss(error)

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        async with self._server_lock:
            try:
                yield
            except EngineLostError as error:
                self._handle_loss(error)

    def _handle_loss(self, error: EngineLostError) -> None:
        """Forget the server and all requests. Called again for the same loss it does nothing."""
        is_used = self._wanted_weights is not None or self._reported_weights is not None
        reported: Exception = error
        if is_used and self._reported_weights is None:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                reported = RuntimeError(
                    f"vLLM could not be made to serve, {self._failed_starts} times in a row: {error}\n"
                    f"{self._server.last_lines()}"
                )
        if is_used:
            log.warning("vLLM is lost: %s\n%s", error, self._server.last_lines())
        self._reset()
        if is_used:
            self.emit(reported)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.emit(error)

    async def _end_tasks(self) -> None:
        self._reset()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def _reset(self) -> None:
        # streams of requests that have ended are cancelled too: closing the client would leave them waiting
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self._turns.clear()
        self._streaming.clear()
        self._update_task = None
        self._wanted_weights = None
        self._reported_weights = None
        self._server_weights = None
        self._is_asleep = False
        self._is_sampling = False
        self._lacks_weights = False
        if self._client is not None:
            self._closing = asyncio.create_task(self._client.close())
            self._client = None
        self._server.stop()
        self._weight_loading.reset()
