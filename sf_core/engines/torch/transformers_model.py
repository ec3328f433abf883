"""Any Hugging Face causal LM over a KV cache of slots, by transformers' own forward pass."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig, remove_tied_weights_from_state_dict

from sf_core.engines.torch.kv_cache import KVCache, Placement
from sf_core.models.decoder import Params


class TransformersModel:
    def __init__(self, model: PreTrainedModel, num_slots: int, context_length: int) -> None:
        config = model.config
        num_heads = config.num_attention_heads
        self._model = model
        self.vocab_size: int = config.vocab_size
        self.shapes = {name: tensor.shape for name, tensor in saved_params(model).items()}
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        shape = num_slots, num_kv_heads, context_length, head_dim
        self.cache = KVCache(config.num_hidden_layers, shape, model.dtype, model.device)
        self._refuse_if_wrong(min(num_slots, 2), context_length)

    def load(self, params: Params) -> None:
        model = self._model
        settings = LoadStateDictConfig(
            device_map={"": model.device}, dtype=model.dtype, weight_mapping=model._weight_conversions
        )
        loaded, _ = convert_and_load_state_dict_in_model(model, dict(params), settings)
        model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
        model.requires_grad_(False)

    def fill(self, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        self._forward(ids, self.cache.place(slots, starts, ids.shape[1]))

    def next_logits(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self._forward(ids.unsqueeze(1), self.cache.place(None, starts, 1))[:, -1]

    def _forward(self, ids: torch.Tensor, placement: Placement) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            position_ids=placement.positions,
            attention_mask=placement.bias(self._model.dtype).unsqueeze(1),
            past_key_values=_SlotCache(self.cache, placement),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits
        return logits

    @torch.inference_mode()
    def _refuse_if_wrong(self, num_rows: int, context_length: int) -> None:
        """Compare with a pass without cache, because an architecture may keep other state than KV, attend in
        a window, or count positions from the mask. Raises ValueError."""
        kind, config = self._model.config.model_type, self._model.config
        window = getattr(config, "sliding_window", None)
        if window is not None and window < context_length:
            raise ValueError(
                f"{kind}: context_length {context_length} must not exceed its attention window of {window}"
            )
        ids = torch.arange(4 * num_rows, device=self._model.device).view(num_rows, 4) % self.vocab_size
        slots = torch.arange(num_rows, device=ids.device)
        starts = torch.zeros_like(slots)
        try:
            self.cache.fit(4)
            self.fill(ids[:, :2], starts, slots)
            self.fill(ids[:, 2:3], starts + 2, slots)
            got = self.next_logits(ids[:, 3], starts + 3)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{kind}: this architecture cannot run over a KV cache of slots: {error}"
            ) from error
        expected = self._model(input_ids=ids).logits[:, -1]
        if not torch.allclose(got.float(), expected.float(), atol=0.05, rtol=0.05):
            raise ValueError(f"{kind}: this architecture gives wrong results over a KV cache of slots")


def saved_params(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters as save_pretrained writes them: without those that are tied to others, and by the names
    of the folder the model came from, where transformers keeps others (one tensor for all experts)."""
    params = remove_tied_weights_from_state_dict(model.state_dict(), model)
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
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        self._cache.write(layer_idx, keys, values, self._placement)
        return self._cache.read(layer_idx, self._placement)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._placement.span - self._placement.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._placement.span, 0
