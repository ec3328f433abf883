"""The models that the torch engine drives, over a KV cache of slots: the lean decoder where it supports the
architecture, else transformers' own forward pass. Knows tensors only, no requests and no sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from sf_core.engines.torch.kv_cache import CacheShape, KVCache
from sf_core.engines.torch.params import CopiedParams, Factors
from sf_core.engines.torch.transformers_model import TransformersModel, unmap_params
from sf_core.models.context import check_context
from sf_core.models.decoder import (
    DecoderSpec,
    causal_attention,
    decoder_spec,
    fuse,
    repeat_kv,
)
from sf_core.models.pretrained.needed_weights import load_model
from sf_core.models.projections import fastest, has_fast_products


class CachedModel(Protocol):
    vocab_size: int
    cache_shape: CacheShape
    params_shapes: dict[str, torch.Size]
    """Shapes of the parameters by Hugging Face name; a tied head is left out."""

    @property
    def remake(self) -> Callable[[CopiedParams], CachedModel]:
        """Makes the same model of other parameters of these names and shapes; refers to no parameters."""
        ...

    def set_adapter(self, factors: Factors) -> None:
        """Add an adapter of these factors to the weights, in place of the one that was added before."""
        ...

    def prefill(self, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the KV of ids [n, T] in the slots [n], sequence i going on at starts[i]."""
        ...

    def next_logits(self, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Store the KV of token ids[i] in slot i; returns the logits of the next token, [n, vocab_size]."""
        ...


def open_model(
    model_dir: str,
    weights_dir: str,
    *,
    context_length: int,
    dtype: torch.dtype,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> CachedModel:
    """The model that `model_dir` describes, with a copy of the weights in `weights_dir`. Raises ValueError if
    the architecture cannot be run correctly over a cache of slots of this length or weights are missing, and
    whatever `check` raises, which is called between tensors."""
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    check_context(config.to_dict(), context_length)
    # its tensors are views of the mapped file
    mapped_model = load_model(
        AutoModelForCausalLM,
        weights_dir,
        config=config,
        # the engine samples by itself; by default transformers looks for the file beside the weights
        generation_config=GenerationConfig(),
        dtype=dtype,
    )
    mapped_model.requires_grad_(False)
    saved = unmap_params(mapped_model)
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    params = CopiedParams(shapes, saved.__getitem__, dtype, device, check)
    spec = decoder_spec(mapped_model.config, context_length)
    if spec is not None:
        return DecoderModel(params, spec)
    return TransformersModel.from_model(mapped_model, params, context_length)


class DecoderModel:
    def __init__(self, params: CopiedParams, spec: DecoderSpec) -> None:
        self._spec = spec
        self.params_shapes = params.shapes
        self.remake = partial(DecoderModel, spec=spec)
        self._decoder = fuse(params, spec, fastest(params.dtype, params.device))
        self.vocab_size = self._decoder.vocab_size
        self.cache_shape = CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim)
        # on the CPU small products are faster than fused attention
        self._has_small_products = has_fast_products(params.dtype, params.device)

    def set_adapter(self, factors: Factors) -> None:
        self._decoder = self._decoder.with_factors(factors.params, factors.scale)

    def prefill(self, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        num_rows, length = ids.shape
        num_heads = self._spec.num_heads
        placement = cache.place(slots, starts, length)
        bias = placement.bias(self._decoder.embedding.dtype).unsqueeze(1) if starts.any() else None

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = num_rows, length
            cache.write(layer, k.unflatten(0, rows), v.unflatten(0, rows), placement)
            if bias is None:
                return causal_attention(q, k, v, num_rows)
            keys, values = cache.read(layer, placement)
            keys = repeat_kv(keys, num_heads)
            values = repeat_kv(values, num_heads)
            queries = q.unflatten(0, rows).transpose(1, 2)
            attended = F.scaled_dot_product_attention(queries, keys, values, bias)
            return attended.transpose(1, 2).flatten(0, 1).flatten(1)

        self._decoder.run(ids.flatten(), placement.positions.flatten(), attend)

    def next_logits(self, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        num_rows = ids.shape[0]
        placement = cache.place(None, starts, 1)
        attention = _small_products if self._has_small_products else F.scaled_dot_product_attention
        dtype = torch.float32 if self._has_small_products else self._decoder.embedding.dtype
        bias = placement.bias(dtype).unsqueeze(1)
        if self._has_small_products:
            bias = bias.expand(-1, spec.num_kv_heads, -1, -1).flatten(0, 1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.write(layer, k.unsqueeze(1), v.unsqueeze(1), placement)
            # heads that share keys and values are as further queries of one head
            queries = q.reshape(num_rows, spec.num_kv_heads, -1, spec.head_dim)
            keys, values = cache.read(layer, placement)
            return attention(queries, keys, values, bias).reshape(num_rows, -1)

        hidden = self._decoder.run(ids, placement.positions.flatten(), attend)
        return self._decoder.head(hidden)


def _small_products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Attention [n * kv_heads, queries, head_dim] by one small matrix product per sequence and head. In
    bfloat16 the scores are rounded, and their softmax is in float32."""
    q = q.flatten(0, 1)
    keys = keys.flatten(0, 1)
    values = values.flatten(0, 1)
    scale = q.shape[-1] ** -0.5
    if q.dtype == torch.float32:
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)
    else:
        scores = torch.add(bias, torch.bmm(q, keys.transpose(1, 2)).float(), alpha=scale)
    return torch.bmm(scores.softmax(-1).to(values.dtype), values)
