"""The network that a trainer trains, as a function from a microbatch to logits. Knows no loss.

The lean decoder runs the architectures it knows, transformers' own code all others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from sf_core.engines.torch.transformers_model import saved_params
from sf_core.models.decoder import decoder_spec, fuse, rotations
from sf_core.training.packing import Microbatch


class Network:
    """A causal LM from a Hugging Face folder, in float32."""

    def __init__(self, model_dir: str, device: str = "cpu") -> None:
        # In evaluation mode: dropout would make these log-probs differ from the engine's.
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        ).eval()
        self.model.to(device)
        self._parameters = dict(self.model.named_parameters())
        self._spec = decoder_spec(self.model.config, max_length=1 << 30)

    def logits(self, microbatch: Microbatch) -> torch.Tensor:
        """[M, vocabulary], one row per trained token: the logits that predict it. The microbatch must be on
        the network's device."""
        if self._spec is None:
            return self._transformers_logits(microbatch)
        decoder = fuse(self._parameters, self._spec)

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, microbatch)

        turns = rotations(self._spec, microbatch.depths)
        hidden = decoder.hidden(microbatch.token_ids, turns, attend)
        return decoder.head(rows(hidden, microbatch.positions))

    def _transformers_logits(self, microbatch: Microbatch) -> torch.Tensor:
        """Run the whole model, because some scale or cap the logits of their head. But the head is given only
        the trained positions: logits of all would take most of the memory."""

        def select(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
            trained = rows(args[0].flatten(0, 1), microbatch.owners[microbatch.positions])
            return trained.unsqueeze(0)

        with self.model.get_output_embeddings().register_forward_pre_hook(select):
            logits: torch.Tensor = self.model(microbatch.padded_ids, use_cache=False).logits
        return logits.squeeze(0)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of what transformers would save, under the names it would save them."""
        params = saved_params(self.model)
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in params.items()}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """Causal attention along every row of the microbatch, [N, heads * head_dim] for its N tokens.

    Only here are shared tokens repeated in each row: attention costs little beside the projections.
    """

    def by_row(tokens: torch.Tensor) -> torch.Tensor:
        return rows(tokens, microbatch.grid).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(by_row(q), by_row(k), by_row(v), is_causal=True, enable_gqa=True)
    return rows(mixed.transpose(1, 2).flatten(0, 1), microbatch.owners).flatten(1)


def rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """tensor[index], where rows may be taken more than once.

    The gradient of plain indexing is summed by threads in arbitrary order and rounds differently each time;
    that of an embedding is summed in a fixed order.
    """
    return F.embedding(index, tensor.flatten(1)).unflatten(-1, tensor.shape[1:])
