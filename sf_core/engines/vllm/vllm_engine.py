"""vLLM behind the Engine protocol. vLLM samples by itself, in processes of its own; a step reports what has
arrived. The event loop that talks to it runs in a thread of this object."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

import msgspec

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.grammar import Vocabularies
from sf_core.engines.protocol import WeightsRefusedError
from sf_core.engines.vllm.places import AdoptedServer, OwnServer, Place
from sf_core.engines.vllm.policy_folder import PolicyFolder
from sf_core.engines.vllm.server import FOLLOWS_GRAMMARS, check_cpu_build
from sf_core.engines.vllm.serving import Event, Serving
from sf_core.surroundings import has_gpu, vllm_key, vllm_python
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef

_STEP_S = 0.005
"""Longest wait of a step for tokens."""


def make_engine(config: RunConfig, start_dir: str, device: WorkerDevice) -> VllmEngine:
    """An engine whose server is started on this process's device, or the one that `engine.vllm.url` names."""
    engine, settings = config.engine, config.engine.vllm
    on_cpu = settings.url is None and not has_gpu()
    if on_cpu:
        check_cpu_build(vllm_python())
    policy = PolicyFolder(start_dir, untied=on_cpu)
    place: Place
    if settings.url is not None:
        place = AdoptedServer(settings.url, vllm_key(), policy, engine.context)
    else:
        place = OwnServer(
            policy,
            dtype=config.policy.dtype_name,
            max_running=engine.max_running,
            context_length=engine.context,
            sleep_level=0 if on_cpu else settings.sleep_level,
            more=[*[FOLLOWS_GRAMMARS] * settings.follows_grammars, *settings.arguments],
        )
    return VllmEngine(
        place,
        vocab_size=policy.vocab_size,
        context_length=engine.context,
        kv_on_update=engine.kv_on_update,
        vocabularies=Vocabularies(policy.read_tokenizer) if settings.follows_grammars else None,
    )


class VllmEngine:
    """An engine of the server at a place. On the CPU its memory stays taken at rest."""

    def __init__(
        self,
        place: Place,
        *,
        vocab_size: int,
        context_length: int,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        vocabularies: Vocabularies | None = None,
    ) -> None:
        """`vocabularies` are what answers with grammars are made of; None: the server follows no grammars."""
        self._vocabularies = vocabularies
        self._vocab_size, self._context_length = vocab_size, context_length
        self._version: int | None = None
        self._names: set[str] = set()
        """Requests whose end was not reported."""
        self._paused = False
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._due: list[Event] = []
        """Events that no step has reported yet."""
        self._serving = Serving(place, keep_kv=kv_on_update == "keep", tell=self._inbox.put)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def num_requests(self) -> int:
        return len(self._names)

    def take_weights(self, weights: WeightsRef) -> None:
        self._loop.call_soon_threadsafe(self._serving.want, weights)

    def submit(self, request: GenerationRequest) -> None:
        # here, because vLLM would say it in the middle of a stream
        ids = request.prompt_ids
        if not 0 < len(ids) < self._context_length:
            raise ValueError(f"prompt has {len(ids)} tokens; allowed are 1 to {self._context_length - 1}")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ValueError(f"prompt has an id outside the vocabulary of {self._vocab_size}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.max_tokens}; expected at least 1")
        if request.request_id in self._names:
            raise ValueError(f"request {request.request_id!r} is already here")
        if request.grammar:
            self._check_grammar(request)
        self._names.add(request.request_id)
        self._loop.call_soon_threadsafe(self._serving.begin, request)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        names = set(self._names if request_ids is None else self._names.intersection(request_ids))
        if not names:
            return []
        self._wait_for(self._serving.abort(names))
        self._collect()
        own: dict[str, list[Chunk]] = {name: [] for name in names}
        others: list[Event] = []
        for event in self._due:
            if isinstance(event, Chunk) and event.request_id in names:
                own[event.request_id].append(event)
            else:
                others.append(event)
        self._due = others
        self._names -= names
        return [chunk for name, chunks in own.items() for chunk in _ended(name, chunks, self._version or 0)]

    def step(self) -> list[Chunk]:
        self._collect(0 if self._paused or self._due else _STEP_S)
        chunks: list[Chunk] = []
        for event in [] if self._paused else self._due:
            if not isinstance(event, Chunk):
                break
            chunks.append(event)
        if chunks:
            del self._due[: len(chunks)]
            self._names.difference_update(c.request_id for c in chunks if c.finish_reason is not None)
            return chunks
        news = next((event for event in self._due if not isinstance(event, Chunk)), None)
        if news is None:
            return []
        self._due.remove(news)
        if isinstance(news, WeightsRef):
            self._version = news.version
            return []
        if not isinstance(news, WeightsRefusedError):
            self._forget()
        raise news

    def pause(self) -> None:
        self._paused = True
        self._wait_for(self._serving.pause())

    def resume(self) -> None:
        self._paused = False
        self._wait_for(self._serving.resume())

    def rest(self) -> None:
        self._wait_for(self._serving.rest())
        self._forget()

    def close(self) -> None:
        self._wait_for(self._serving.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._forget()

    def _check_grammar(self, request: GenerationRequest) -> None:
        """Raises ValueError for what would end the server."""
        if self._vocabularies is None:
            raise ValueError("a grammar was given, and this server follows none")
        self._vocabularies.of(request.stop_token_ids).begin(request.grammar)

    def _collect(self, wait_s: float = 0) -> None:
        with suppress(Empty):
            if wait_s:
                self._due.append(self._inbox.get(timeout=wait_s))
            while True:
                self._due.append(self._inbox.get_nowait())

    def _wait_for(self, command: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(command, self._loop).result()

    def _forget(self) -> None:
        self._collect()
        self._due.clear()
        self._names.clear()
        self._version = None


def _ended(name: str, chunks: list[Chunk], version: int) -> list[Chunk]:
    """What was not reported, as one chunk, or one for each version that sampled some; the last one ends the
    request."""
    merged = [Chunk(name, [], [], chunks[0].version if chunks else version)]
    for chunk in chunks:
        if chunk.version != merged[-1].version:
            merged.append(Chunk(name, [], [], chunk.version))
        merged[-1].token_ids.extend(chunk.token_ids)
        merged[-1].logprobs.extend(chunk.logprobs)
    reason = chunks[-1].finish_reason if chunks else None
    return [*merged[:-1], msgspec.structs.replace(merged[-1], finish_reason=reason or FinishReason.ABORT)]
