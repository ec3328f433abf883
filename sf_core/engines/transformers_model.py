"""Any Hugging Face causal LM over the KV of slots, by transformers' own forward pass and a cache it can use."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from sf_core.engines.decoder import Params
from sf_core.engines.kv_cache import KVCache, Placement


class TransformersModel:
    def __init__(self, model: PreTrainedModel, num_slots: int, context_length: int) -> None:
        config = model.config
        num_heads = config.num_attention_heads
        self._model = model
        self.vocab_size: int = config.vocab_size
        self.params: Params = _without_tied_head(model)
        self.cache = KVCache(
            config.num_hidden_layers,
            num_slots,
            getattr(config, "num_key_value_heads", None) or num_heads,
            getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            model.dtype,
            model.device,
        )
        self._refuse_if_wrong(context_length)

    def load(self, params: Params) -> None:
        # Not strict: tied parameters follow the one they are tied to.
        self._model.load_state_dict(dict(params), strict=False)

    def fill(self, ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        self._forward(ids, self.cache.place(slots, starts, ids.shape[1]), logits_to_keep=1)

    def next_logits(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self._forward(ids.unsqueeze(1), self.cache.place(None, starts, 1), logits_to_keep=1)[:, -1]

    def _forward(self, ids: torch.Tensor, placement: Placement, logits_to_keep: int) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            position_ids=placement.positions,
            attention_mask=placement.visible.unsqueeze(1),
            past_key_values=_SlotCache(self.cache, placement),
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        logits: torch.Tensor = output.logits
        return logits

    @torch.inference_mode()
    def _refuse_if_wrong(self, context_length: int) -> None:
        """Compare with a forward pass without cache: an architecture may keep other state than KV, look through
        a window, or read positions from the mask."""
        kind, config = self._model.config.model_type, self._model.config
        window = getattr(config, "sliding_window", None)
        if window is not None and window < context_length:
            raise ValueError(
                f"{kind}: context_length {context_length} must not exceed its attention window of {window}"
            )
        ids = torch.arange(3 * 4, device=self._model.device).view(3, 4) % self.vocab_size
        zeros = torch.zeros(3, dtype=torch.long, device=ids.device)
        try:
            self.fill(ids[:, :2], zeros, torch.arange(3, device=ids.device))
            self.next_logits(ids[:, 2], zeros + 2)
            got = self.next_logits(ids[:2, 3], zeros[:2] + 3)
        except (TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{kind}: this architecture cannot run over a KV cache of slots: {error}"
            ) from error
        expected = self._model(input_ids=ids[:2]).logits[:, -1]
        if not torch.allclose(got.float(), expected.float(), atol=0.05, rtol=0.05):
            raise ValueError(f"{kind}: this architecture gives wrong results over a KV cache of slots")


def _without_tied_head(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    params = model.state_dict()
    if model.config.tie_word_embeddings:
        params.pop("lm_head.weight", None)
    return params


class _SlotCache(Cache):
    """Shows transformers one placement in the slots as its cache."""

    def __init__(self, cache: KVCache, placement: Placement) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._placement = placement

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(
            layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2), self._placement
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._placement.span - self._placement.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._placement.span, 0
