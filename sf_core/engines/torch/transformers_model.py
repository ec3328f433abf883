"""Any Hugging Face causal LM over a KV cache of slots, by transformers' own forward pass."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig, remove_tied_weights_from_state_dict

from sf_core.engines.torch.kv_cache import CacheShape, KVCache, Placement
from sf_core.engines.torch.params import CopiedParams, Factors
from sf_core.models.decoder import DOWN, UP, LowRank


class TransformersModel:
    def __init__(self, params: CopiedParams, skeleton: PreTrainedModel) -> None:
        """`skeleton`: the model without memory for its parameters."""
        self.params_shapes = params.shapes
        model = copy.deepcopy(skeleton)
        settings = LoadStateDictConfig(
            device_map={"": params.device}, dtype=params.dtype, weight_mapping=model._weight_conversions
        )
        loaded, _ = convert_and_load_state_dict_in_model(model, dict(params), settings)
        model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
        self._model = model.requires_grad_(False)
        self._adapter_hooks: list[RemovableHandle] = []
        """Hooks that add the adapter's part to the outputs of linear layers."""
        self.remake = partial(TransformersModel, skeleton=skeleton)
        config = model.config
        self.vocab_size: int = config.vocab_size
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self.cache_shape = CacheShape(config.num_hidden_layers, num_kv_heads, head_dim)

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, params: CopiedParams, context_length: int
    ) -> TransformersModel:
        """The model with these parameters. Raises ValueError if its architecture cannot be run correctly
        over a cache of slots of this length."""
        meta_parameters = {
            id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
            for p in model.parameters()
        }
        skeleton = copy.deepcopy(model, meta_parameters)
        for module in skeleton.modules():
            module._buffers.update(
                {
                    name: None if buffer is None else buffer.to(params.device, copy=True)
                    for name, buffer in module._buffers.items()
                }
            )
        cached = cls(params, skeleton)
        cached._check_against_uncached_pass(context_length)
        return cached

    def set_adapter(self, factors: Factors) -> None:
        for hook in self._adapter_hooks:
            hook.remove()
        self._adapter_hooks.clear()
        params = factors.params
        for layer in sorted({name.rpartition(".")[0] for name in params}):
            adapter = LowRank(params[f"{layer}.{DOWN}"], params[f"{layer}.{UP}"] * factors.scale)
            module = self._model.get_submodule(layer)
            self._adapter_hooks.append(module.register_forward_hook(partial(_add_adapter_output, adapter)))

    def prefill(self, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        self._forward(cache, ids, cache.place(slots, starts, ids.shape[1]))

    def next_logits(self, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self._forward(cache, ids.unsqueeze(1), cache.place(None, starts, 1))[:, -1]

    def _forward(self, cache: KVCache, ids: torch.Tensor, placement: Placement) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            position_ids=placement.positions,
            attention_mask=placement.bias(self._model.dtype).unsqueeze(1),
            past_key_values=_SlotCache(cache, placement),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits
        return logits

    @torch.inference_mode()
    def _check_against_uncached_pass(self, context_length: int) -> None:
        """Compare with a pass without cache, because an architecture may keep other state than KV, attend in
        a window, or count positions from the mask. Raises ValueError if the logits differ."""
        kind = self._model.config.model_type
        config = self._model.config
        window = getattr(config, "sliding_window", None)
        if window is not None and window < context_length:
            raise ValueError(
                f"{kind}: context_length {context_length} must not exceed the model's attention window of "
                f"{window}"
            )
        # two sequences of four tokens: prefilled by two tokens and one token, then sampled from the last
        ids = torch.arange(8, device=self._model.device).view(2, 4) % self.vocab_size
        slots = torch.arange(2, device=ids.device)
        starts = torch.zeros_like(slots)
        try:
            cache = KVCache(self.cache_shape, 2, 4, self._model.dtype, ids.device)
            cache.fit(4)
            self.prefill(cache, ids[:, :2], starts, slots)
            self.prefill(cache, ids[:, 2:3], starts + 2, slots)
            cached_logits = self.next_logits(cache, ids[:, 3], starts + 3)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{kind}: this architecture cannot run with the engine's KV cache: {error}"
            ) from error
        uncached_logits = self._model(input_ids=ids).logits[:, -1]
        if not torch.allclose(cached_logits.float(), uncached_logits.float(), atol=0.05, rtol=0.05):
            raise ValueError(f"{kind}: this architecture gives wrong results with the engine's KV cache")


def _add_adapter_output(
    adapter: LowRank, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    return output + adapter(inputs[0])


def unmap_params(
    model: PreTrainedModel, state: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The model's parameters, or those that are given as its state, as save_pretrained writes them: without
    those that are tied to others, and by the names of the model's folder, from which the names within
    transformers may differ (one tensor for all experts)."""
    params = remove_tied_weights_from_state_dict(model.state_dict() if state is None else state, model)
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, params)
    return saved


class _SlotCache(Cache):
    """One placement in the slots as a cache of transformers."""

    def __init__(self, cache: KVCache, placement: Placement) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._placement = placement

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = key_states.transpose(1, 2)
        values = value_states.transpose(1, 2)
        self._cache.write(layer_idx, keys, values, self._placement)
        return self._cache.read(layer_idx, self._placement)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._placement.span - self._placement.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._placement.span, 0
