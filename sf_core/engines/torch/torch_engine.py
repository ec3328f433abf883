"""The built-in engine: continuous batching of any Hugging Face causal LM on one device.

Every step: waiting requests take idle slots, a piece of the missing KV is filled in (filling.py), then one
token is sampled, in one batch, for every running request whose KV is complete. New weights come from
loading.py; the model is in cached_model.py, its cache in kv_cache.py, the slot table in slots.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.grammar import Following, Vocabularies
from sf_core.engines.masking import mask_forbidden
from sf_core.engines.protocol import EngineLostError, WeightsRefusedError, check_request
from sf_core.engines.torch.cached_model import CachedModel
from sf_core.engines.torch.filling import fill, to_device
from sf_core.engines.torch.kv_cache import KVCache
from sf_core.engines.torch.loading import Arrival, Loader
from sf_core.engines.torch.slots import SlotTable
from sf_core.models.counter import uniforms
from sf_core.models.sampling import sample
from sf_core.surroundings import trim_memory
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef
from storage.files import join, read_bytes

_NO_DISTRIBUTION = "the logits of its next token are no distribution: NaN, infinite, or all forbidden"

_MIN_SHARED = 8
"""Shorter common prefixes are recomputed: copying them would cost as much."""


def local_device() -> str:
    """The device that this process computes on: the GPU that it was given, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    # it makes a plan for every new shape, which takes up to a second, and our shapes differ in each step
    torch.backends.cuda.enable_cudnn_sdp(False)
    return "cuda"


def make_engine(config: RunConfig, start_dir: str, device: WorkerDevice) -> TorchEngine:
    """An engine on this process's device, for the architecture of the start folder."""
    settings = config.engine
    return TorchEngine(
        start_dir,
        None if config.train.lora is None else join(start_dir, "adapter"),
        max_running=settings.max_running,
        context_length=settings.context,
        kv_on_update=settings.kv_on_update,
        dtype=getattr(torch, config.policy.dtype_name),
        device=local_device(),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """What an engine that is not at rest has on its device."""

    version: int
    model: CachedModel
    cache: KVCache


class TorchEngine:
    """An engine of the architecture of a model folder, whose weights, if it is given an adapter, are that
    adapter's over those of the folder. If the architecture cannot be run, or the device has no memory for the
    cache, the step that would have begun to serve raises ValueError."""

    def __init__(
        self,
        model_dir: str,
        adapter_dir: str | None = None,
        *,
        max_running: int,
        context_length: int,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._dtype = dtype
        self._max_running = max_running
        self._context_length = context_length
        self._keep_kv = kv_on_update == "keep"
        self._vocabularies = Vocabularies(lambda: read_bytes(join(model_dir, "tokenizer.json")))
        self._loader = Loader(
            model_dir, adapter_dir, context_length=context_length, dtype=dtype, device=self._device
        )
        self._held: _Held | None = None
        self._forget_requests()

    @property
    def version(self) -> int | None:
        return None if self._held is None else self._held.version

    @property
    def num_requests(self) -> int:
        return self._table.num_running + len(self._waiting)

    def take_weights(self, weights: WeightsRef) -> None:
        self._loader.begin(weights, None if self._held is None else self._held.model)

    def submit(self, request: GenerationRequest) -> None:
        assert self._held is not None, "an engine without weights was given a request"
        check_request(request, self._context_length, self._held.model.vocab_size)
        if request.request_id in self._waiting or request.request_id in self._table:
            raise ValueError(f"request {request.request_id!r} is already running")
        if request.grammar:
            vocabulary = self._vocabularies.of(request.stop_token_ids)
            sampled = request.prompt_ids[len(request.prompt_ids) - request.position :]
            self._following[request.request_id] = Following(vocabulary, request.grammar, sampled)
        self._waiting[request.request_id] = request

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        if self._held is None:
            return []
        wanted = [*self._table.request_ids, *self._waiting] if request_ids is None else list(request_ids)
        chunks = []
        for request_id in wanted:
            if request_id in self._table:
                chunks.append(self._table.abort(request_id, self._held.version))
            elif self._waiting.pop(request_id, None) is not None:
                chunks.append(Chunk(request_id, [], [], self._held.version, FinishReason.ABORT))
            self._following.pop(request_id, None)
        return chunks

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        if (arrival := self._arrival()) is not None:
            return self._replace_weights(arrival)
        if self._held is None or self._paused:
            return []
        try:
            return self._sample(self._held)
        except Exception:
            # table and cache may disagree now
            self._forget_requests()
            raise

    def _sample(self, held: _Held) -> list[Chunk]:
        model = held.model
        cache = held.cache
        table = self._table
        self._admit(cache)
        if not table.num_running:
            return []
        self._close_holes(cache)
        cache.fit(table.longest)
        fill(model, cache, table)
        # Each row processes its next uncached token; once the prompt is exhausted, a new token is sampled.
        rows = table.running
        ready = np.flatnonzero(rows["cached"] == rows["length"] - 1)
        if not len(ready):
            return []
        ids = table.tokens[np.arange(len(rows)), rows["cached"]]
        logits = model.next_logits(
            cache, to_device(ids, self._device), to_device(rows["cached"], self._device)
        )
        rows["cached"] += 1
        if len(ready) < len(rows):
            logits = logits[to_device(ready, self._device)]
            rows = rows[ready]
        following = self._list_following(ready)
        if following:
            mask_forbidden(logits, [at for at, _ in following], [one for _, one in following])
        draws = uniforms(rows["seed"], rows["position"])
        token_ids, logprobs = sample(logits, rows["temperature"], rows["top_p"], rows["top_k"], draws)
        for at, one in following:
            one.take([int(token_ids[at])])
        failed: list[Chunk] = []
        if not (sound := np.isfinite(logprobs)).all():
            failed = self._fail(held, ready[~sound].tolist())
            ready = ready[sound]
            token_ids = token_ids[sound]
            logprobs = logprobs[sound]
        table.append(ready, token_ids, logprobs, held.version)
        chunks = [*failed, *table.report_due(ready)]
        for chunk in chunks if following else ():
            if chunk.finish_reason is not None:
                self._following.pop(chunk.request_id, None)
        return chunks

    def _fail(self, held: _Held, slots: list[int]) -> list[Chunk]:
        """End the requests in these slots, whose logits are no distribution."""
        # what is NaN there would spread to the next requests in these slots
        held.cache.clear(slots)
        chunks = [self._table.abort(self._table.request_in(slot), held.version) for slot in slots]
        self._table.rows["cached"][slots] = 0
        return [replace(chunk, fault=_NO_DISTRIBUTION) for chunk in chunks]

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def rest(self) -> None:
        self._loader.cancel()
        self._held = None
        self._forget_requests()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.rest()
        self._loader.close()

    def _forget_requests(self) -> None:
        self._table = SlotTable(self._max_running, self._context_length)
        self._waiting: dict[str, GenerationRequest] = {}
        self._following: dict[str, Following] = {}
        """Where requests that follow a grammar are in it."""
        self._paused = False

    def _list_following(self, slots: npt.NDArray[np.intp]) -> list[tuple[int, Following]]:
        """Those of these slots whose requests follow a grammar, by their index."""
        if not self._following:
            return []
        named = [self._following.get(self._table.request_in(slot)) for slot in slots.tolist()]
        return [(at, one) for at, one in enumerate(named) if one is not None]

    def _arrival(self) -> Arrival | None:
        try:
            return self._loader.arrival()
        except Exception as error:
            if self._held is None:
                raise
            raise WeightsRefusedError(str(error)) from error

    def _replace_weights(self, arrival: Arrival) -> list[Chunk]:
        """Returns chunks of the tokens of earlier weights that were not reported yet."""
        older = self._table.report_older_than(arrival.version)
        held = self._held
        self._held = None
        model, cache = (None, None) if held is None else (held.model, held.cache)
        try:
            if arrival.make is not None:
                # The old model goes first: the new one may need its memory.
                held = model = None
                model = arrival.make()
            assert model is not None
            if arrival.factors is not None:
                model.take_factors(arrival.factors)
        except Exception as error:
            self.rest()
            raise EngineLostError(
                f"only some weights of version {arrival.version} were loaded: {error}"
            ) from error
        if cache is None:
            cache = KVCache(
                model.cache_shape, self._max_running, self._context_length, self._dtype, self._device
            )
        self._held = _Held(arrival.version, model, cache)
        if arrival.make is not None:
            # reading and packing took twice what the model takes
            trim_memory()
        self._table.note_new_weights(keep_kv=self._keep_kv)
        return older

    def _admit(self, cache: KVCache) -> None:
        while self._waiting and self._table.num_running < self._max_running:
            request = self._waiting.pop(next(iter(self._waiting)))
            source, shared = self._table.longest_prefix(np.array(request.prompt_ids))
            # The last token is left to compute: the draw needs its logits.
            shared = min(shared, len(request.prompt_ids) - 1)
            slot = self._table.idle_slot(source, shared)
            if shared < _MIN_SHARED:
                shared = 0
            elif slot != source:
                cache.copy(source, [slot], shared)
            self._table.occupy(slot, request, shared)

    def _close_holes(self, cache: KVCache) -> None:
        holes, movers = self._table.holes()
        if holes:
            cache.swap(holes, movers, int(self._table.rows["length"].max()))
            self._table.swap(holes, movers)
