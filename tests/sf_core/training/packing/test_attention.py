"""Attention along the rows of a microbatch is that of each row by itself, however the rows are packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sf_core.training.packing import attention
from sf_core.training.packing.attention import RowAttention
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Microbatch, Packing, pack
from tests.bench import closeness
from tests.bench.training.batches import make_batch
from tests.sf_core.training.packing.packed_batches import batches

HEADS = 4
HEAD_DIM = 8
Rows = list[tuple[list[int], list[bool]]]


def packed(rows: Rows, packing: Packing) -> Iterator[Microbatch]:
    return pack(read_rows(make_batch(rows)), packing)


def of_each_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """The same by the definition."""
    found = torch.zeros_like(q)
    k, v = (tokens.repeat_interleave(HEADS // k.shape[1], 1) for tokens in (k, v))
    for row, (start, end) in enumerate(microbatch.own.tolist()):
        index = microbatch.grid[row, :end]
        scores = torch.einsum("qhd,khd->hqk", q[index], k[index]) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(end, end, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[index])
        found = found.index_put((index[start:],), mixed[start:])
    return found.flatten(1)


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@given(
    rows=batches,
    max_tokens=st.integers(1, 60),
    rule=st.sampled_from(["distinct", "padded"]),
    seed=st.integers(0, 9),
)
def test_each_token_attends_to_its_row_once_and_its_gradients_are_those_of_all_rows(
    by_products: bool,
    kv_heads: int,
    rows: Rows,
    max_tokens: int,
    rule: Literal["distinct", "padded"],
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # float32 by products, whose sums bfloat16 would round
        patch.setattr(attention, "has_fast_products", lambda *_: by_products)
        patch.setattr(attention, "_BY_PRODUCTS", torch.float32)
        patch.setattr(attention, "_QUERIES", 3)
        for microbatch in packed(rows, Packing(max_tokens, rule)):
            random = torch.Generator().manual_seed(seed)
            shapes = [(len(microbatch.token_ids), heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
            inputs = [torch.randn(shape, generator=random, requires_grad=True) for shape in shapes]
            taught = torch.randn(len(microbatch.token_ids), HEADS * HEAD_DIM, generator=random)
            found = []
            for attend in (RowAttention(microbatch, torch.float32), None):
                mixed = of_each_row(*inputs, microbatch) if attend is None else attend(*inputs)
                found.append([mixed, *torch.autograd.grad((mixed * taught).sum(), inputs)])
            # where a token sees only itself, the gradient of its query is 0 or a rounding
            scale = max(float(theirs.abs().max()) for theirs in found[1])
            for ours, theirs in zip(*found, strict=True):
                closeness.assert_rounded(ours, theirs, closeness.FORWARD, scale=scale)
