"""Causal attention along every row of a microbatch, for any network that takes the distinct tokens.

A token attends once, however many rows have it. Only its keys are repeated: they are gathered for a part of
the rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from sf_core.models.projections import has_fast_products
from sf_core.training.packing.trie import Microbatch

_SHORT = 256
"""Most tokens of rows whose weights of attention may be kept."""

_BY_PRODUCTS = torch.bfloat16
"""Dtype in which a CPU attends by products: there the fused backward pass takes twice as long, and its
gradients are less exact."""

_QUERIES = 16
"""Number of tokens that attend together where the weights are kept."""

_MOST_PADDING = 1.25
"""Most products of a query and a key that a part computes, per product that is needed."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(queries [B, heads, Q, head_dim], keys and values [B, kv_heads, K, head_dim], seen [B, Q, K] bool) -> mixed
values [B, heads, Q, head_dim]. If `seen` is None, Q is K, and a query sees the keys up to its own."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens [start, end) of a row, which see the row's tokens up to themselves."""

    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Blocks that one call of a kernel computes."""

    queries: torch.Tensor
    """[B, Q] index of each token; arbitrary after the end of a block."""
    keys: torch.Tensor
    """[B, K] index of each token; arbitrary after the end of a block."""
    seen: torch.Tensor | None
    """[B, Q, K] whether a query sees a key; None: those up to its own."""


class RowAttention:
    """The attention of one microbatch, on its device and in one dtype, for all layers of a network."""

    def __init__(self, microbatch: Microbatch, dtype: torch.dtype) -> None:
        grid = microbatch.grid
        num_rows, width = grid.shape
        by_products = width <= _SHORT and dtype == _BY_PRODUCTS and has_fast_products(dtype, grid.device)
        fits = num_rows == 1 or num_rows * width <= microbatch.bound
        if microbatch.rule == "padded" or (fits and not by_products):
            self._kernel: Kernel = _attend_in_whole_rows if by_products else _attend
            self._parts = [_Part(grid, grid, None)]
            self._output_rows = microbatch.owners
        else:
            self._kernel = _attend_by_products if by_products else _attend
            self._parts, self._output_rows = _plan(microbatch, _QUERIES if by_products else None)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[N, heads * head_dim] for queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim] of
        the N tokens."""
        mixed = [self._attend(part, q, k, v) for part in self._parts]
        return rows(mixed[0] if len(mixed) == 1 else torch.cat(mixed), self._output_rows).flatten(1)

    def _attend(self, part: _Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[B * Q, heads, head_dim]"""
        if part.seen is None or self._kernel is not _attend:
            return self._compute(part, q, k, v)
        # what it would keep for the backward pass is repeated in each row
        again: torch.Tensor = checkpoint(
            self._compute, part, q, k, v, use_reentrant=False, preserve_rng_state=False
        )
        return again

    def _compute(self, part: _Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries = rows(q, part.queries).transpose(1, 2)
        keys = rows(k, part.keys).transpose(1, 2)
        values = rows(v, part.keys).transpose(1, 2)
        mixed = self._kernel(queries, keys, values, part.seen)
        return mixed.transpose(1, 2).flatten(0, 1)


def rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """tensor[index], where rows may be taken more than once.

    The gradient of plain indexing is summed by threads in arbitrary order and rounds differently each time;
    that of an embedding is summed in a fixed order.
    """
    return F.embedding(index, tensor.flatten(1)).unflatten(-1, tensor.shape[1:])


def _plan(microbatch: Microbatch, block: int | None) -> tuple[list[_Part], torch.Tensor]:
    """The parts in which all tokens of a microbatch attend once, and the place [N] of each token among their
    queries. `block`: most tokens of a block; None: what a row has beside the rows before it is one block."""
    device = microbatch.grid.device
    grid = microbatch.grid.cpu().numpy()
    output_rows = np.zeros(len(microbatch.token_ids), np.int64)
    parts = []
    num_queries = 0
    cut = _cut(microbatch, block)
    for blocks in [cut] if block else _group(cut, microbatch.bound):
        longest = max(part.length for part in blocks)
        width = max(part.end for part in blocks)
        queries = np.zeros((len(blocks), longest), np.int64)
        depths = np.zeros((len(blocks), longest), np.int64)
        for line, part in enumerate(blocks):
            own = grid[part.row, part.start : part.end]
            queries[line, : part.length] = own
            depths[line, : part.length] = np.arange(part.start, part.end)
            output_rows[own] = num_queries + line * longest + np.arange(part.length)
        num_queries += queries.size
        keys = grid[[part.row for part in blocks], :width]
        is_causal = block is None and blocks[0].start == 0
        seen = None if is_causal else torch.from_numpy(np.arange(width) <= depths[:, :, None])
        parts.append(
            _Part(
                torch.from_numpy(queries).to(device),
                torch.from_numpy(keys).to(device),
                None if seen is None else seen.to(device),
            )
        )
    return parts, torch.from_numpy(output_rows).to(device)


def _cut(microbatch: Microbatch, block: int | None) -> list[_Block]:
    """Blocks of the tokens of each row that no row before it has: whole rows first, and then by length."""
    blocks = []
    for row, (start, end) in enumerate(microbatch.own.tolist()):
        length = block or max(end - start, 1)
        for begin in range(start, end, length):
            blocks.append(_Block(row, begin, min(begin + length, end)))
    blocks.sort(key=lambda cut: (cut.start > 0, cut.end, cut.length, cut.row))
    return blocks


def _group(blocks: Sequence[_Block], most_keys: int) -> Iterator[list[_Block]]:
    """The blocks of each part. A part has at most so many keys, padding included, unless it is one block."""
    together: list[_Block] = []
    needed = longest = width = 0
    for block in blocks:
        longest = max(longest, block.length)
        width = max(width, block.end)
        needed += block.length * block.end
        number = len(together) + 1
        is_other = together and (together[0].start > 0) != (block.start > 0)
        is_padded = number * longest * width > _MOST_PADDING * needed
        if together and (is_other or is_padded or number * width > most_keys):
            yield together
            together = []
            needed = block.length * block.end
            longest = block.length
            width = block.end
        together.append(block)
    yield together


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    if seen is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # the kernels of a GPU that take a mask want as many keys as queries
    shared = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(shared, 1)
    values = v.repeat_interleave(shared, 1)
    return F.scaled_dot_product_attention(q, keys, values, seen.unsqueeze(1))


def _attend_by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None
) -> torch.Tensor:
    """The same by matrix products, with the softmax in float32. The weights of attention are kept for the
    backward pass in the dtype of the values, so it is for short rows."""
    assert seen is not None
    # heads that share keys and values are as further queries of one head
    kv_heads = k.shape[1]
    shared = q.shape[1] // kv_heads
    queries = q.unflatten(1, (kv_heads, shared)).flatten(2, 3).flatten(0, 1)
    mixed: torch.Tensor = _Products.apply(queries, k.flatten(0, 1), v.flatten(0, 1), ~seen, shared)
    return mixed.view(q.shape)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, shared: int
    ) -> torch.Tensor:
        """`hidden`: [B, Q, K] of q [B * kv_heads, shared * Q, head_dim]."""
        scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(q.shape[-1] ** -0.5)
        num_parts, num_queries, num_keys = hidden.shape
        by_part = scores.view(num_parts, -1, shared, num_queries, num_keys)
        by_part.masked_fill_(hidden[:, None, None], -torch.inf)
        weights = scores.softmax(-1).to(v.dtype)
        ctx.save_for_backward(q, k, v, weights)
        return torch.bmm(weights, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        of_v = torch.bmm(weights.transpose(1, 2), gradient)
        of_weights = torch.bmm(gradient, v.transpose(1, 2)).float()
        of_scores = torch._softmax_backward_data(of_weights, weights.float(), -1, torch.float32).to(q.dtype)
        of_q = torch.bmm(of_scores, k).mul_(scale)
        of_k = torch.bmm(of_scores.transpose(1, 2), q).mul_(scale)
        return of_q, of_k, of_v, None, None


def _attend_in_whole_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor | None
) -> torch.Tensor:
    """Attention by products over whole rows. Steps with the rule `padded` are computed this way."""
    heads, length, width = q.shape[1:]
    shared = heads // k.shape[1]
    queries = q.unflatten(1, (-1, shared)).flatten(2, 3).flatten(0, 1)
    keys = k.flatten(0, 1)
    scores = torch.bmm(queries, keys.transpose(1, 2)).float() * width**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    scores.masked_fill_(hidden.repeat(shared, 1), -torch.inf)
    weights = scores.softmax(-1).to(v.dtype)
    mixed = torch.bmm(weights, v.flatten(0, 1))
    return mixed.view(q.shape)
