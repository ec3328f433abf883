"""Where the tensors that Hugging Face names lie in the parameters of Megatron's GPTModel, for the models that
limits.py lets pass.

Megatron has queries, keys and values in one parameter, group by group; gate and up in another; and of most
parameters each tensor-parallel rank has a part: of rows, or of columns where the input is what is split.

How the ranks of a gang divide a policy among themselves: tensor-parallel ranks are neighbours, then come
the data-parallel ones, then the stages of the pipeline.

Megatron is given these groups and keeps no list of its own (`parallel_state`), so nothing of it is left when
the gang parts and torch.distributed's groups are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from sf_core.training.torch.ranks import Ranks
from storage.tensors.checkpoints import Slice

Parts = tuple[tuple[int, ...], ...]
"""The ranks of each group."""


def make_groups(
    ranks: Ranks, device: torch.device, tensor_parallel: int, pipeline_parallel: int
) -> ProcessGroupCollection:
    """The groups of this rank. All ranks must call it at once."""
    all_ranks = ranks.mesh(device.type).get_group()
    grid = torch.arange(ranks.size).view(pipeline_parallel, -1, tensor_parallel)
    groups_by_parts: dict[Parts, Any] = {}

    def own_group(parts: torch.Tensor) -> Any:
        """This rank's group of those in the rows of a matrix."""
        key = tuple(map(tuple, parts.tolist()))
        is_one_group = len(parts) == 1
        has_all_ranks = parts.numel() == ranks.size
        if is_one_group and has_all_ranks:
            return all_ranks
        if key not in groups_by_parts:
            groups_by_parts[key] = _make_subgroups(key, all_ranks, device)
        return groups_by_parts[key]

    tensor = own_group(grid.flatten(0, 1))
    data = own_group(grid.transpose(1, 2).flatten(0, 1))
    stages = grid.permute(1, 2, 0).flatten(0, 1)
    # those that may share an embedding
    ends = stages[:, [0, -1]] if pipeline_parallel > 1 else stages
    alone = own_group(grid.view(-1, 1))
    return ProcessGroupCollection(
        tp=tensor,
        tp_cp=tensor,
        pp=own_group(stages),
        mp=own_group(grid.transpose(0, 1).flatten(1)),
        embd=own_group(ends),
        dp=data,
        dp_cp=data,
        expt_dp=data,
        intra_dist_opt=all_ranks,
        cp=alone,
        ep=alone,
        pos_embd=alone,
    )


def _make_subgroups(parts: Parts, all_ranks: Any, device: torch.device) -> Any:
    timeout = all_ranks._get_backend(device).options._timeout
    backend = "nccl" if device.type == "cuda" else "gloo"
    own, _ = dist.new_subgroups_by_enumeration([list(part) for part in parts], timeout, backend)
    return own


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """What a parameter of Megatron's has of a tensor."""

    name: str
    slice_in_tensor: Slice
    of: Callable[[torch.Tensor], torch.Tensor]
    """View of the piece in a tensor of the parameter's shape, or one that can be reshaped to the place."""
    replicated: bool
    """Whether every tensor-parallel rank has all of it."""


VALUE_HEAD = "value_head"
"""What makes values of a critic's hidden states; on every tensor-parallel rank of the last stage."""

NAMES = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""Parameters of a layer that hold one tensor."""


@dataclass(frozen=True, slots=True)
class ParameterParts:
    """The pieces of Hugging Face's tensors that the parameters of one rank consist of."""

    vocab_size: int
    head_dim: int
    queries_per_group: int
    """Number of query heads that share a key and a value."""
    tied: bool
    """Whether the embedding is the head too."""
    rank: int
    """This rank among the tensor-parallel ones."""
    parts: int
    """Number of tensor-parallel ranks."""
    first_layer: int
    """Number of the first layer of this stage of the pipeline."""

    def of(self, parameter: str, size: tuple[int, ...]) -> list[ParameterPart]:
        """The pieces in a parameter of this name, of which this rank has a tensor of this size."""
        if parameter == "embedding.word_embeddings.weight":
            return [self._vocabulary("model.embed_tokens.weight", size)]
        if parameter == "output_layer.weight":
            name = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
            return [self._vocabulary(name, size)]
        if parameter == VALUE_HEAD:
            return [_replicate(VALUE_HEAD, size)]
        if parameter == "decoder.final_layernorm.weight":
            return [_replicate("model.norm.weight", size)]
        _, _, layer, own = parameter.split(".", 3)
        prefix = f"model.layers.{int(layer) + self.first_layer}."
        if own.startswith("self_attention.linear_qkv."):
            return list(self._heads(prefix, own.rsplit(".", 1)[1], size))
        if own == "mlp.linear_fc1.weight":
            return list(self._split_gated(prefix, size))
        if own in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
            whole = (size[0], size[1] * self.parts)
            slice_in_tensor = Slice(whole, (0, self.rank * size[1]), size)
            return [
                ParameterPart(prefix + NAMES[own], slice_in_tensor, lambda tensor: tensor, replicated=False)
            ]
        return [_replicate(prefix + NAMES[own], size)]

    def _vocabulary(self, name: str, size: tuple[int, ...]) -> ParameterPart:
        """Rows of the embedding or the head. What they are padded with, so that they can be split evenly, is
        no part of it."""
        total = self.vocab_size
        own = vocabulary_rows(total, size[0], self.rank)
        num_rows = own.stop - own.start
        slice_in_tensor = Slice((total, size[1]), (own.start, 0), (num_rows, size[1]))
        return ParameterPart(name, slice_in_tensor, lambda tensor: tensor[:num_rows], replicated=False)

    def _heads(self, prefix: str, kind: str, size: tuple[int, ...]) -> Iterator[ParameterPart]:
        queries = self.queries_per_group
        head_dim = self.head_dim
        groups = size[0] // ((queries + 2) * head_dim)
        for name, heads in (
            ("q", slice(0, queries)),
            ("k", slice(queries, queries + 1)),
            ("v", slice(queries + 1, queries + 2)),
        ):

            def of(tensor: torch.Tensor, heads: slice = heads) -> torch.Tensor:
                return tensor.view(groups, queries + 2, head_dim, *size[1:])[:, heads]

            rows = groups * (heads.stop - heads.start) * head_dim
            yield self._rows(f"{prefix}self_attn.{name}_proj.{kind}", (rows, *size[1:]), of)

    def _split_gated(self, prefix: str, size: tuple[int, ...]) -> Iterator[ParameterPart]:
        rows = size[0] // 2
        for name, begin in (("gate", 0), ("up", rows)):

            def of(tensor: torch.Tensor, begin: int = begin) -> torch.Tensor:
                return tensor[begin : begin + rows]

            yield self._rows(f"{prefix}mlp.{name}_proj.weight", (rows, *size[1:]), of)

    def _rows(
        self, name: str, size: tuple[int, ...], of: Callable[[torch.Tensor], torch.Tensor]
    ) -> ParameterPart:
        """This rank's part of a tensor of whose rows each tensor-parallel rank has as many."""
        whole = (size[0] * self.parts, *size[1:])
        offset = (size[0] * self.rank, *[0] * (len(size) - 1))
        return ParameterPart(name, Slice(whole, offset, size), of, replicated=False)


def vocabulary_rows(vocabulary: int, padded: int, rank: int) -> slice:
    """The rows of the vocabulary that a tensor-parallel rank has, each of which has `padded` rows."""
    return slice(*(min(vocabulary, (rank + i) * padded) for i in (0, 1)))


def _replicate(name: str, size: tuple[int, ...]) -> ParameterPart:
    return ParameterPart(name, Slice.whole(size), lambda tensor: tensor, replicated=True)
