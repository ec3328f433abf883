"""Where the tensors that Hugging Face names lie in the parameters of Megatron's GPTModel, for the models that
limits.py lets pass.

Megatron has queries, keys and values in one parameter, group by group; gate and up in another; and of most
parameters each tensor-parallel rank has a part: of rows, or of columns where the input is what is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from storage.tensors.shards import Slice


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
