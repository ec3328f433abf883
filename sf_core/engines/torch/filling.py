"""Computes KV that is missing in the cache, a bounded piece of it before each token that is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sf_core.engines.torch.cached_model import CachedModel
from sf_core.engines.torch.kv_cache import KVCache
from sf_core.engines.torch.slots import SlotTable

_STEP_TOKENS = 2048
"""Most tokens whose KV one step computes, so that running requests do not wait long for their next one. A
pass over several sequences computes no more either, padding included."""

_PASS_POSITIONS = 32_768
"""Most cached positions that a pass over several sequences reads."""


def fill(model: CachedModel, cache: KVCache, table: SlotTable) -> None:
    """Fill in KV before the last tokens of running requests, oldest requests first: first of prompts, equal
    ones once, then of what was sampled after them, all of which is missing once weights have changed."""
    rows = table.running
    tokens = table.tokens
    budget = _STEP_TOKENS
    prompts_end = rows["prompt"] - 1
    oldest = rows["since"].argsort()
    lacks_prompt = rows["cached"] < prompts_end
    leaders: dict[bytes | int, int] = {}
    followers: dict[int, list[int]] = {}
    for slot in oldest[lacks_prompt[oldest]].tolist():
        # KV that earlier weights computed in part serves its own request only
        prompt = slot if rows["mixed"][slot] else tokens[slot, : prompts_end[slot]].tobytes()
        leader = leaders.setdefault(prompt, slot)
        if leader != slot:
            followers.setdefault(leader, []).append(slot)
    budget = _fill_up_to(prompts_end, list(leaders.values()), budget, model, cache, table)
    for leader, slots in followers.items():
        if rows["cached"][leader] == prompts_end[leader]:
            cache.copy(leader, slots, int(prompts_end[leader]))
            rows["cached"][slots] = prompts_end[leader]
    sampled_end = rows["length"] - 1
    lacks_sampled = (prompts_end <= rows["cached"]) & (rows["cached"] < sampled_end)
    _fill_up_to(sampled_end, oldest[lacks_sampled[oldest]].tolist(), budget, model, cache, table)


def _fill_up_to(
    ends: npt.NDArray[np.int32],
    slots: list[int],
    budget: int,
    model: CachedModel,
    cache: KVCache,
    table: SlotTable,
) -> int:
    """Compute missing KV of these slots, the first ones first, in passes of similar lengths. Returns what is
    left of the budget."""
    cached = table.running["cached"]
    pieces: list[tuple[int, int]] = []
    for slot in slots:
        piece = min(int(ends[slot] - cached[slot]), budget)
        if piece > 0:
            pieces.append((piece, slot))
            budget -= piece
    pieces.sort(reverse=True)
    while pieces:
        width = pieces[0][0]
        now = np.array([slot for _, slot in pieces])
        reached = cached[now] + np.array([piece for piece, _ in pieces])
        num_rows = max(1, min(_STEP_TOKENS // width, _PASS_POSITIONS // int(reached.max())))
        now = now[:num_rows]
        reached = reached[:num_rows]
        pieces = pieces[num_rows:]
        # A shorter gap is widened to the left, over KV that is there already, so that no sequence grows.
        starts = np.maximum(reached - width, 0)
        ids = table.tokens[now[:, None], starts[:, None] + np.arange(width)]
        model.fill(cache, *(to_device(values, cache.device) for values in (ids, starts, now)))
        cached[now] = reached
    return budget


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
