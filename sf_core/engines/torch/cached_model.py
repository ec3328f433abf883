"""The model that the torch engine drives, over a KV cache of slots: the lean decoder where it supports the
architecture, else transformers' own forward pass. Knows tensors only, no requests and no sampling."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from sf_core.engines.torch.kv_cache import KVCache, Placement
from sf_core.engines.torch.transformers_model import TransformersModel, saved_params
from sf_core.models.context import check_context
from sf_core.models.decoder import (
    Attend,
    DecoderSpec,
    Params,
    causal_attention,
    decoder_spec,
    fuse,
    rotations,
)
from sf_core.models.projections import fastest


class CachedModel(Protocol):
    cache: KVCache
    shapes: dict[str, torch.Size]
    """Shapes of the parameters by Hugging Face name; a tied head is left out."""
    vocab_size: int

    def fill(self, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the KV of ids [n, T] in the slots [n], sequence i going on at starts[i]."""
        ...

    def next_logits(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Store the KV of token ids[i] in slot i; returns the logits of the next token, [n, vocab_size]."""
        ...

    def load(self, params: Params) -> None:
        """Replace the parameters by others of the same names and shapes."""
        ...


def open_model(
    model_dir: str,
    *,
    weights_dir: str | None = None,
    num_slots: int,
    context_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CachedModel:
    """The model that `model_dir` describes, with its weights or those in `weights_dir`. Raises ValueError if
    the architecture cannot be run correctly over a cache of slots of this length, weights are missing, or the
    device has no memory for the cache."""
    weights_dir = weights_dir or model_dir
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    check_context(config.to_dict(), context_length)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        weights_dir,
        config=config,
        # the engine draws by itself; by default the file is looked for beside the weights
        generation_config=GenerationConfig(),
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{weights_dir}: the weights lack {missing[0]!r} ({len(missing)} tensors missing)")
    model.to(device).eval().requires_grad_(False)
    spec = decoder_spec(model.config, context_length)
    if spec is None:
        return TransformersModel(model, num_slots, context_length)
    return DecoderModel(saved_params(model), spec, num_slots, context_length)


class DecoderModel:
    def __init__(self, params: Params, spec: DecoderSpec, num_slots: int, context_length: int) -> None:
        self._spec = spec
        self.shapes = {name: tensor.shape for name, tensor in params.items()}
        self.load(params)
        embedding = self._decoder.embedding
        self.vocab_size = embedding.shape[0]
        shape = num_slots, spec.num_kv_heads, context_length, spec.head_dim
        self.cache = KVCache(spec.num_layers, shape, embedding.dtype, embedding.device)

    def load(self, params: Params) -> None:
        embedding = params["model.embed_tokens.weight"]
        self._decoder = fuse(params, self._spec, fastest(embedding.dtype, embedding.device))

    def fill(self, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        num_rows, length = ids.shape
        placement = self.cache.place(slots, starts, length)
        mask = placement.visible.unsqueeze(1)
        whole = not starts.any()

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = num_rows, length
            self.cache.write(layer, k.unflatten(0, rows), v.unflatten(0, rows), placement)
            if whole:
                return causal_attention(q, k, v, num_rows)
            keys, values = self.cache.read(layer, placement)
            queries = q.unflatten(0, rows).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

        self._hidden(ids, placement, attend)

    def next_logits(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        spec, num_rows = self._spec, ids.shape[0]
        placement = self.cache.place(None, starts, 1)
        # One small matrix product per row and KV head; fused attention is slower at one query per row.
        bias = placement.bias(self._decoder.embedding.dtype).repeat_interleave(spec.num_kv_heads, 0)
        scale = spec.head_dim**-0.5

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, k.unsqueeze(1), v.unsqueeze(1), placement)
            keys, values = self.cache.read(layer, placement)
            queries = q.reshape(num_rows * spec.num_kv_heads, -1, spec.head_dim)
            scores = torch.baddbmm(bias, queries, keys.flatten(0, 1).transpose(1, 2), alpha=scale)
            return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(num_rows, -1)

        return self._decoder.head(self._hidden(ids.unsqueeze(1), placement, attend))

    def _hidden(self, ids: torch.Tensor, placement: Placement, attend: Attend) -> torch.Tensor:
        turned = rotations(self._spec, placement.positions.flatten())
        return self._decoder.hidden(ids.flatten(), turned, attend)
