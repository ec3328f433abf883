"""The built-in engine: continuous batching of any Hugging Face causal LM on one device.

Every step: waiting requests get idle slots, a part of the missing KV is prefilled (prefill.py), then one
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
from sf_core.engines.grammar import GrammarState, Vocabularies
from sf_core.engines.masking import mask_forbidden
from sf_core.engines.protocol import EngineLostError, WeightsRefusedError, check_request
from sf_core.engines.torch.cached_model import CachedModel
from sf_core.engines.torch.kv_cache import KVCache
from sf_core.engines.torch.loading import LoadedWeights, Loader
from sf_core.engines.torch.prefill import prefill, to_device
from sf_core.engines.torch.slots import SlotTable
from sf_core.models.counter import uniforms
from sf_core.models.sampling import sample
from sf_core.process.limits import trim_memory
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef
from storage.files import join, read_bytes

_INVALID_LOGITS = "the logits of its next token are no distribution: NaN, infinite, or all forbidden"

_MIN_SHARED_PREFIX = 8
"""Fewest tokens of a common prefix whose KV is copied: to compute a shorter one costs as much."""


def local_device() -> str:
    """The device that this process computes on: the GPU that it was given, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    # cuDNN makes a plan for every new shape, which takes up to a second, and our shapes differ in each step
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
class _LoadedModel:
    """The model on the device, its version and its KV cache."""

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
        self._loaded: _LoadedModel | None = None
        self._reset_requests()

    @property
    def version(self) -> int | None:
        return None if self._loaded is None else self._loaded.version

    @property
    def num_requests(self) -> int:
        return self._table.num_running + len(self._waiting)

    def update_weights(self, weights: WeightsRef) -> None:
        self._loader.begin(weights, None if self._loaded is None else self._loaded.model)

    def submit(self, request: GenerationRequest) -> None:
        assert self._loaded is not None, "an engine without weights was given a request"
        check_request(request, self._context_length, self._loaded.model.vocab_size)
        if request.request_id in self._waiting or request.request_id in self._table:
            raise ValueError(f"request {request.request_id!r} is already running")
        if request.grammar:
            vocabulary = self._vocabularies.of(request.stop_token_ids)
            sampled = request.prompt_ids[len(request.prompt_ids) - request.position :]
            self._grammar_states[request.request_id] = GrammarState(vocabulary, request.grammar, sampled)
        self._waiting[request.request_id] = request

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        if self._loaded is None:
            return []
        wanted = [*self._table.request_ids, *self._waiting] if request_ids is None else list(request_ids)
        chunks = []
        for request_id in wanted:
            if request_id in self._table:
                chunks.append(self._table.abort(request_id, self._loaded.version))
            elif self._waiting.pop(request_id, None) is not None:
                chunks.append(Chunk(request_id, [], [], self._loaded.version, FinishReason.ABORT))
            self._grammar_states.pop(request_id, None)
        return chunks

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        if (loaded_weights := self._poll_loader()) is not None:
            return self._replace_weights(loaded_weights)
        if self._loaded is None or self._paused:
            return []
        try:
            return self._sample(self._loaded)
        except Exception:
            # after an error within a step, table and cache may disagree
            self._reset_requests()
            raise

    def _sample(self, loaded: _LoadedModel) -> list[Chunk]:
        model = loaded.model
        cache = loaded.cache
        table = self._table
        self._admit_waiting(cache)
        if not table.num_running:
            return []
        self._close_holes(cache)
        cache.fit(table.longest)
        prefill(model, cache, table)
        # Each row processes its next uncached token; a row that has no other uncached token is sampled.
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
        grammar_states = self._list_grammar_states(ready)
        if grammar_states:
            constrained_rows = [row for row, _ in grammar_states]
            mask_forbidden(logits, constrained_rows, [state for _, state in grammar_states])
        draws = uniforms(rows["seed"], rows["position"])
        token_ids, logprobs = sample(logits, rows["temperature"], rows["top_p"], rows["top_k"], draws)
        for row, state in grammar_states:
            state.advance([int(token_ids[row])])
        failed: list[Chunk] = []
        is_finite = np.isfinite(logprobs)
        if not is_finite.all():
            failed = self._end_failed(loaded, ready[~is_finite].tolist())
            ready = ready[is_finite]
            token_ids = token_ids[is_finite]
            logprobs = logprobs[is_finite]
        table.append(ready, token_ids, logprobs, loaded.version)
        chunks = [*failed, *table.report_due(ready)]
        for chunk in chunks if grammar_states else ():
            if chunk.finish_reason is not None:
                self._grammar_states.pop(chunk.request_id, None)
        return chunks

    def _end_failed(self, loaded: _LoadedModel, slots: list[int]) -> list[Chunk]:
        """End the requests in these slots, whose logits are no distribution."""
        # NaN in the KV would spread to the next requests in these slots
        loaded.cache.clear(slots)
        chunks = [self._table.abort(self._table.request_id_at(slot), loaded.version) for slot in slots]
        self._table.rows["cached"][slots] = 0
        return [replace(chunk, fault=_INVALID_LOGITS) for chunk in chunks]

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def rest(self) -> None:
        self._loader.cancel()
        self._loaded = None
        self._reset_requests()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.rest()
        self._loader.close()

    def _reset_requests(self) -> None:
        self._table = SlotTable(self._max_running, self._context_length)
        self._waiting: dict[str, GenerationRequest] = {}
        self._grammar_states: dict[str, GrammarState] = {}
        """The state of each request that follows a grammar, by its id."""
        self._paused = False

    def _list_grammar_states(self, slots: npt.NDArray[np.intp]) -> list[tuple[int, GrammarState]]:
        """The grammar states of the requests in these slots that have one, each with its index in `slots`."""
        if not self._grammar_states:
            return []
        states = [self._grammar_states.get(self._table.request_id_at(slot)) for slot in slots.tolist()]
        return [(index, state) for index, state in enumerate(states) if state is not None]

    def _poll_loader(self) -> LoadedWeights | None:
        try:
            return self._loader.poll()
        except Exception as error:
            if self._loaded is None:
                raise
            raise WeightsRefusedError(str(error)) from error

    def _replace_weights(self, loaded_weights: LoadedWeights) -> list[Chunk]:
        """Returns chunks of the tokens of earlier weights that were not reported yet."""
        older_chunks = self._table.report_older_than(loaded_weights.version)
        loaded = self._loaded
        self._loaded = None
        model = None if loaded is None else loaded.model
        cache = None if loaded is None else loaded.cache
        try:
            if loaded_weights.make is not None:
                # drop the old model first, because the new one may need its memory
                loaded = None
                model = None
                model = loaded_weights.make()
            assert model is not None
            if loaded_weights.factors is not None:
                model.set_adapter(loaded_weights.factors)
        except Exception as error:
            self.rest()
            raise EngineLostError(
                f"only some weights of version {loaded_weights.version} were loaded: {error}"
            ) from error
        if cache is None:
            cache = KVCache(
                model.cache_shape, self._max_running, self._context_length, self._dtype, self._device
            )
        self._loaded = _LoadedModel(loaded_weights.version, model, cache)
        if loaded_weights.make is not None:
            # to read and pack the weights took twice the memory of the model
            trim_memory()
        self._table.invalidate_kv(keep_kv=self._keep_kv)
        return older_chunks

    def _admit_waiting(self, cache: KVCache) -> None:
        while self._waiting and self._table.num_running < self._max_running:
            request = self._waiting.pop(next(iter(self._waiting)))
            source, shared = self._table.longest_prefix(np.array(request.prompt_ids))
            # the last token is always computed, because sampling needs its logits
            shared = min(shared, len(request.prompt_ids) - 1)
            slot = self._table.idle_slot(source, shared)
            if shared < _MIN_SHARED_PREFIX:
                shared = 0
            elif slot != source:
                cache.copy(source, [slot], shared)
            self._table.occupy(slot, request, shared)

    def _close_holes(self, cache: KVCache) -> None:
        holes, moved_slots = self._table.holes()
        if holes:
            cache.swap(holes, moved_slots, int(self._table.rows["length"].max()))
            self._table.swap(holes, moved_slots)
