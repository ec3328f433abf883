"""Computes KV that is missing in the cache, a bounded piece of it before each token that is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sf_core.engines.torch.cached_model import CachedModel
from sf_core.engines.torch.kv_cache import KVCache
from sf_core.engines.torch.slots import SlotTable

_MAX_STEP_TOKENS = 2048
"""Most tokens whose KV one step computes, so that running requests do not wait long for their next one. A
pass over several sequences computes no more either, padding included."""

_MAX_PASS_POSITIONS = 32_768
"""Most cached positions that a pass over several sequences reads."""


def prefill(model: CachedModel, cache: KVCache, table: SlotTable) -> None:
    """Compute the KV of running requests up to their last tokens, oldest requests first: first of prompts,
    equal ones once, then of sampled tokens, whose KV is missing only once weights have changed."""
    rows = table.running
    tokens = table.tokens
    budget = _MAX_STEP_TOKENS
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
    budget = _prefill_up_to(prompts_end, list(leaders.values()), budget, model, cache, table)
    for leader, slots in followers.items():
        if rows["cached"][leader] == prompts_end[leader]:
            cache.copy(leader, slots, int(prompts_end[leader]))
            rows["cached"][slots] = prompts_end[leader]
    sampled_end = rows["length"] - 1
    lacks_sampled = (prompts_end <= rows["cached"]) & (rows["cached"] < sampled_end)
    _prefill_up_to(sampled_end, oldest[lacks_sampled[oldest]].tolist(), budget, model, cache, table)


def _prefill_up_to(
    ends: npt.NDArray[np.int32],
    slots: list[int],
    budget: int,
    model: CachedModel,
    cache: KVCache,
    table: SlotTable,
) -> int:
    """Compute missing KV of these slots up to their `ends`, in the order of the slots, within the budget of
    tokens. Returns what is left of the budget."""
    cached = table.running["cached"]
    missing: list[tuple[int, int]] = []
    for slot in slots:
        num_tokens = min(int(ends[slot] - cached[slot]), budget)
        if num_tokens > 0:
            missing.append((num_tokens, slot))
            budget -= num_tokens
    # longest first, so that a pass has sequences of similar lengths
    missing.sort(reverse=True)
    while missing:
        width = missing[0][0]
        pass_slots = np.array([slot for _, slot in missing])
        pass_ends = cached[pass_slots] + np.array([num_tokens for num_tokens, _ in missing])
        most_by_tokens = _MAX_STEP_TOKENS // width
        most_by_positions = _MAX_PASS_POSITIONS // int(pass_ends.max())
        num_rows = max(1, min(most_by_tokens, most_by_positions))
        pass_slots = pass_slots[:num_rows]
        pass_ends = pass_ends[:num_rows]
        missing = missing[num_rows:]
        # a shorter gap is widened to the left, over KV that is computed already, so that no sequence grows
        starts = np.maximum(pass_ends - width, 0)
        ids = table.tokens[pass_slots[:, None], starts[:, None] + np.arange(width)]
        model.prefill(cache, *(to_device(values, cache.device) for values in (ids, starts, pass_slots)))
        cached[pass_slots] = pass_ends
    return budget


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
