"""The built-in engine: continuous batching of any Hugging Face causal LM on one device.

Every step: waiting requests take idle slots, missing KV is filled in, then one token is sampled for every
running request in one batch. The model and its KV cache are in cached_model.py, the slot table in slots.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from typing import Any, Literal

import fsspec
import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch

from sf_core.config import RunConfig
from sf_core.engines.torch.cached_model import open_model
from sf_core.engines.torch.slots import SlotTable
from sf_core.models.counter import uniforms
from sf_core.models.sampling import sample
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef
from storage.files import join, local_copy, local_folder
from storage.weights import FILE_NAME, WEIGHT_FILES

_FILL_TOKENS = 8192
"""Most tokens, padding included, of one filling pass."""

_MIN_SHARED = 8
"""Shorter common prefixes are recomputed: copying them would cost as much."""


def local_device() -> str:
    """The device that this process computes on: the GPU that it was given, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_engine(config: RunConfig, start_dir: str, weights: WeightsRef) -> TorchEngine:
    """An engine on this process's device. Of the start folder it reads the weights only as version 0."""
    settings = config.engine
    make = partial(
        TorchEngine,
        version=weights.version,
        max_running=settings.max_running,
        context_length=settings.context_length,
        kv_on_update=settings.kv_on_update,
        device=local_device(),
    )
    if weights.version == 0:
        return make(local_folder(start_dir))
    with local_copy(join(weights.uri, FILE_NAME)) as file:
        return make(local_folder(start_dir, exclude=WEIGHT_FILES), weights_dir=os.path.dirname(file))


class TorchEngine:
    """An engine of one model folder, or of its architecture with the weights of another folder. Raises
    ValueError if the architecture cannot be run, or the weights are not all there."""

    def __init__(
        self,
        model_dir: str,
        *,
        weights_dir: str | None = None,
        version: int = 0,
        max_running: int,
        context_length: int,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._model = open_model(
            model_dir,
            weights_dir=weights_dir,
            num_slots=max_running,
            context_length=context_length,
            dtype=dtype,
            device=self._device,
        )
        self._table = SlotTable(max_running, context_length)
        self._waiting: dict[str, GenerationRequest] = {}
        self._version = version
        self._max_running = max_running
        self._context_length = context_length
        self._keep_kv = kv_on_update == "keep"
        self._dtype = dtype

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_requests(self) -> int:
        return self._table.num_running + len(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        ids = request.prompt_ids
        if not 0 < len(ids) < self._context_length:
            raise ValueError(f"prompt has {len(ids)} tokens; allowed are 1 to {self._context_length - 1}")
        if min(ids) < 0 or max(ids) >= self._model.vocab_size:
            raise ValueError(f"prompt has an id outside the vocabulary of {self._model.vocab_size}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.max_tokens}; expected at least 1")
        if request.request_id in self._waiting or request.request_id in self._table:
            raise ValueError(f"request {request.request_id!r} is already here")
        self._waiting[request.request_id] = request

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        wanted = [*self._table.request_ids, *self._waiting] if request_ids is None else list(request_ids)
        chunks = []
        for request_id in wanted:
            if request_id in self._table:
                chunks.append(self._table.abort(request_id, self._version))
            elif self._waiting.pop(request_id, None) is not None:
                chunks.append(Chunk(request_id, [], [], self._version, FinishReason.ABORT))
        return chunks

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        older = self._table.report_older_than(self._version)
        self._admit()
        if not self._table.num_running:
            return older
        self._close_holes()
        self._model.cache.fit(self._table.longest)
        self._fill()
        rows = self._table.running
        ids = self._table.tokens[np.arange(len(rows)), rows["length"] - 1]
        logits = self._model.next_logits(self._tensor(ids), self._tensor(rows["length"] - 1))
        draws = uniforms(rows["seed"], rows["position"])
        token_ids, logprobs = sample(logits, rows["temperature"], rows["top_p"], rows["top_k"], draws)
        self._table.append(token_ids, logprobs, self._version)
        return older + self._table.report_due()

    @torch.inference_mode()
    def load_weights(self, uri: str, version: int) -> None:
        with fsspec.open(f"{uri}/model.safetensors", "rb") as file:
            params = _parse_tensors(file.read(), uri)
        _check_shapes({name: tensor.shape for name, tensor in params.items()}, self._model.shapes)
        self._model.load({name: t.to(self._device, self._dtype) for name, t in params.items()})
        self._version = version
        self._table.note_new_weights(keep_kv=self._keep_kv)

    def close(self) -> None:
        del self._model, self._table
        self._waiting.clear()

    def _admit(self) -> None:
        while self._waiting and self._table.num_running < self._max_running:
            request = self._waiting.pop(next(iter(self._waiting)))
            source, shared = self._table.longest_prefix(np.array(request.prompt_ids))
            # The last token is left to compute: the draw needs its logits.
            shared = min(shared, len(request.prompt_ids) - 1)
            slot = self._table.idle_slot(source, shared)
            if shared < _MIN_SHARED:
                shared = 0
            elif slot != source:
                self._model.cache.copy(source, [slot], shared)
            self._table.occupy(slot, request, shared)

    def _close_holes(self) -> None:
        holes, movers = self._table.holes()
        if holes:
            self._model.cache.swap(holes, movers, int(self._table.rows["length"].max()))
            self._table.swap(holes, movers)

    def _fill(self) -> None:
        """Make the KV of every running request valid up to its last token: first prompts, equal ones once,
        then what was sampled after them, all of which is missing once weights have changed."""
        rows, tokens = self._table.running, self._table.tokens
        prompts_end = rows["prompt"] - 1
        leaders: dict[bytes, int] = {}
        followers: dict[int, list[int]] = {}
        for slot in np.flatnonzero(rows["cached"] < prompts_end).tolist():
            leader = leaders.setdefault(tokens[slot, : prompts_end[slot]].tobytes(), slot)
            if leader != slot:
                followers.setdefault(leader, []).append(slot)
        self._fill_up_to(prompts_end, list(leaders.values()))
        for leader, slots in followers.items():
            self._model.cache.copy(leader, slots, int(prompts_end[leader]))
            rows["cached"][slots] = prompts_end[leader]
        self._fill_up_to(rows["length"] - 1, np.flatnonzero(rows["cached"] < rows["length"] - 1).tolist())

    def _fill_up_to(self, ends: npt.NDArray[np.int32], slots: list[int]) -> None:
        """Compute the missing KV of these slots in passes of similar lengths."""
        rows, tokens = self._table.running, self._table.tokens
        slots = sorted(slots, key=lambda slot: int(ends[slot] - rows["cached"][slot]), reverse=True)
        while slots:
            width = int(ends[slots[0]] - rows["cached"][slots[0]])
            num_rows = max(1, _FILL_TOKENS // width)
            now, slots = np.array(slots[:num_rows]), slots[num_rows:]
            # A shorter gap is widened to the left, over KV that is there already, so that no sequence grows.
            starts = np.maximum(ends[now] - width, 0)
            ids = tokens[now[:, None], starts[:, None] + np.arange(width)]
            self._model.fill(self._tensor(ids), self._tensor(starts), self._tensor(now))
            rows["cached"][now] = ends[now]

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def _parse_tensors(data: bytes, uri: str) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{uri}: not a complete safetensors file: {error}") from None


def _check_shapes(got: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    if missing := sorted(expected.keys() - got.keys()):
        raise ValueError(f"weights lack {missing[0]!r} ({len(missing)} tensors missing)")
    if unknown := sorted(got.keys() - expected.keys()):
        raise ValueError(f"weights have {unknown[0]!r}, unknown to the model ({len(unknown)} tensors)")
    for name, shape in got.items():
        if shape != expected[name]:
            raise ValueError(f"weights have {name!r} of shape {[*shape]}; expected {[*expected[name]]}")
