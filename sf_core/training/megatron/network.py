"""Megatron's GPTModel as a function from a microbatch to scores of its tokens. Knows no loss.

Packed rows go through it as they are: as one sequence of distinct tokens, with the rotary angles of the
depths at which they stand, and with our attention along every row in the place of Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from sf_core.models.decoder import DecoderSpec
from sf_core.models.scoring import Split, score
from sf_core.training.megatron.mapping import vocabulary_rows
from sf_core.training.packing.attention import RowAttention, rows
from sf_core.training.packing.trie import Microbatch


class MegatronNetwork(GPTModel):
    """This rank's part of a policy: of each layer, and of the layers."""

    def __init__(
        self,
        config: Any,
        spec: DecoderSpec,
        groups: ProcessGroupCollection,
        dtype: torch.dtype,
        *,
        recompute: bool,
        values: bool,
    ) -> None:
        """`config`: Hugging Face's. `values`: values take the place of log-probs. The weights are still to be
        loaded."""
        stage = groups.pp.rank()
        stages = groups.pp.size()
        parts = groups.tp.size()
        qk_norm = config.model_type == "qwen3"
        layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
        layer.submodules.self_attention.submodules.core_attention = _Attention
        super().__init__(
            TransformerConfig(
                num_layers=spec.num_layers,
                hidden_size=config.hidden_size,
                ffn_hidden_size=config.intermediate_size,
                num_attention_heads=spec.num_heads,
                num_query_groups=spec.num_kv_heads,
                kv_channels=spec.head_dim,
                normalization="RMSNorm",
                layernorm_epsilon=spec.norm_eps,
                # also has the gradients of these norms summed over tensor-parallel ranks
                qk_layernorm=qk_norm,
                gated_linear_unit=True,
                activation_func=F.silu,
                add_bias_linear=False,
                add_qkv_bias=config.model_type == "qwen2",
                hidden_dropout=0.0,
                attention_dropout=0.0,
                # without being initialised, parameters would not say how they are split
                perform_initialization=True,
                init_method=_keep_uninitialised,
                output_layer_init_method=_keep_uninitialised,
                use_cpu_initialization=True,
                tensor_model_parallel_size=parts,
                pipeline_model_parallel_size=stages,
                params_dtype=dtype,
                pipeline_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                # a loss is a sum, to be divided neither by the number of microbatches nor by that of ranks
                calculate_per_token_loss=True,
                # microbatches differ in length, which Megatron allows with this choice for experts, of which
                # there are none
                variable_seq_lengths=True,
                moe_token_dispatcher_type="alltoall",
                batch_p2p_comm=False,
                recompute_granularity="full" if recompute else None,
                recompute_method="uniform" if recompute else None,
                recompute_num_layers=1 if recompute else None,
                # kernels of Apex and Transformer Engine
                bias_dropout_fusion=False,
                bias_activation_fusion=False,
                masked_softmax_fusion=False,
                apply_rope_fusion=False,
                gradient_accumulation_fusion=False,
                persist_layer_norm=False,
            ),
            layer,
            vocab_size=-(-config.vocab_size // parts) * parts,
            max_sequence_length=1 << 30,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            # we have our own angles
            position_embedding_type="none",
            pg_collection=groups,
        )
        self._frequencies = spec.inv_freq
        self._split = _split_head(config.vocab_size, groups.tp)
        if values and self.post_process:
            self.value_head = nn.Parameter(torch.zeros(config.hidden_size))
        # Megatron makes norms in float32
        self.to(dtype)

    def forward(self, microbatch: Microbatch) -> Any:
        """Log-probs [M] of the trained tokens and the entropies [M], differentiable, on the last stage of the
        pipeline; what the next stage takes on the others. The microbatch must be on the network's device."""
        x = None
        if self.pre_process:
            x = self.embedding(microbatch.token_ids.unsqueeze(0), position_ids=None)
        angles = microbatch.depths.unsqueeze(1) * self._frequencies.to(microbatch.depths.device)
        # [N, 1, 1, head_dim]: for a batch of one, and for all heads
        rotary = torch.cat((angles, angles), 1)[:, None, None, :]
        attend = RowAttention(microbatch, self.config.params_dtype)
        # what comes as a bias reaches attention unchanged, also when a layer is computed again
        x = self.decoder(x, None, rotary_pos_emb=rotary, attention_bias=attend)
        return self._scores(x, microbatch) if self.post_process else x

    def _scores(self, x: torch.Tensor, microbatch: Microbatch) -> tuple[torch.Tensor, ...]:
        head = self.output_layer.weight
        if head is None:
            head = self.embedding.word_embeddings.weight
        outputs = rows(x, microbatch.positions).squeeze(1)
        if hasattr(self, "value_head"):
            values = outputs.float() @ self.value_head.float()
            return values, torch.zeros_like(values)
        if (split := self._split) is not None:
            outputs = copy_to_tensor_model_parallel_region(outputs, self.pg_collection.tp)
            head = head[: split.own.stop - split.own.start]
        drawn = microbatch.sampling
        temperature = drawn["temperature"]
        top_p = drawn["top_p"]
        top_k = drawn["top_k"]
        return score(outputs, head, microbatch.targets, temperature, top_p, top_k, split)


def _split_head(vocabulary: int, group: Any) -> Split | None:
    """How the head is split among the tensor-parallel ranks of this group."""
    if (parts := group.size()) == 1:
        return None
    padded = -(-vocabulary // parts)

    def gather(logits: torch.Tensor) -> torch.Tensor:
        own = F.pad(logits, (0, padded - logits.shape[1]))
        gathered = [torch.empty_like(own) for _ in range(parts)]
        dist.all_gather(gathered, own, group=group)
        return torch.cat(gathered, 1)[:, :vocabulary]

    return Split(vocabulary, vocabulary_rows(vocabulary, padded, group.rank()), gather)


class _Attention(nn.Module):
    """Attention along the rows of a microbatch, which comes in the place of a bias."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        _: None,
        *,
        attention_bias: RowAttention,
        **__: Any,
    ) -> torch.Tensor:
        """[N, 1, heads * head_dim] for tokens [N, 1, heads, head_dim]."""
        return attention_bias(q.squeeze(1), k.squeeze(1), v.squeeze(1)).unsqueeze(1)


def _keep_uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
