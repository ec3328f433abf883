"""Draws tokens from logits. Pure: no model, no state.

The distribution: logits over temperature, then the top_k best tokens, then the smallest set of those whose
probability reaches top_p, renormalised.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

_BLOCK = 256
"""Tokens whose probabilities are summed before one of them is searched for: a sum of the whole vocabulary in
its order takes eight times as long."""


def sample(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    uniforms: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """One token per row of logits [B, V], by inverse CDF of the row's uniform in [0, 1).

    Returns ids and log-probs [B]. Temperature 0 takes the best token, ignores top_p and top_k, and reports
    its log-prob at temperature 1. A row without a distribution (NaN, infinity, nothing but -inf) gets a valid
    id and the log-prob NaN; it changes no other row.
    """
    logits = logits.float()
    greedy = temperature == 0
    if (temperature != 1).any():
        logits = logits / _column(np.where(greedy, 1, temperature), logits)
    if ((top_p < 1) | (top_k > 0)).any():
        lowest = cutoff(logits, np.where(greedy, 1, top_p), np.where(greedy, 0, top_k))
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    highest = logits.amax(dim=-1, keepdim=True)
    weights = (logits - highest).exp_()
    tokens, total = _draw(weights, torch.from_numpy(uniforms).to(logits.device))
    if greedy.any():
        best = logits.argmax(dim=-1, keepdim=True)
        tokens = torch.where(_column(greedy, logits).bool(), best, tokens)
    logprobs = logits.gather(1, tokens) - highest - total.log().float()
    return tokens.squeeze(1).cpu().numpy(), logprobs.squeeze(1).cpu().numpy()


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token [B, 1] per row of weights [B, V], never one of weight 0, and the sums [B, 1] of the weights."""
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    # double: with u < 1 the target stays below the total
    sums = blocks.sum(2).double().cumsum(1)
    total = sums[:, -1:]
    target = uniforms.unsqueeze(1) * total
    # clamped, because in a row of NaN nothing is found
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    sum_before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    in_block = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1)
    sums_in_block = in_block.double().cumsum(1)
    # the block was summed in float32: what is left may be more than it holds
    rest = torch.minimum(target - sum_before, sums_in_block[:, -1:] * (1 - 1e-15))
    tokens = block * _BLOCK + torch.searchsorted(sums_in_block, rest, right=True)
    return tokens.clamp_(max=weights.shape[1] - 1), total


def cutoff(
    logits: torch.Tensor, top_p: npt.NDArray[np.float32], top_k: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Smallest logit [B, 1] that stays in the support."""
    vocab_size = logits.shape[1]
    ranked = logits.sort(dim=-1, descending=True).values
    by_top_k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    num_kept = _column(by_top_k, logits).long()
    rank = torch.arange(vocab_size, device=logits.device)
    probs = ranked.masked_fill(rank >= num_kept, -torch.inf).softmax(dim=-1)
    # A token stays if those before it have not reached top_p; the best one always does.
    reached = probs.cumsum(dim=-1, dtype=torch.float64) - probs >= _column(top_p, logits)
    by_top_p = (~reached).sum(dim=-1, keepdim=True).clamp(min=1)
    num_kept = torch.minimum(num_kept, by_top_p)
    return ranked.gather(1, num_kept - 1)


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
