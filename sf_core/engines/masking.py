"""Logits of answers that follow a grammar. Loaded by vLLM's processes too (vllm/grammar_processor.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sf_core.engines.grammar import GrammarState, find_forbidden


def mask_forbidden(logits: torch.Tensor, rows: Sequence[int], states: Sequence[GrammarState]) -> None:
    """Set the logits of forbidden tokens to -inf, in these rows of logits [B, V]. All answers are of one
    vocabulary."""
    mask = torch.from_numpy(find_forbidden(states, logits.shape[1])).to(logits.device)
    has_all_rows = [*rows] == [*range(len(logits))]
    if has_all_rows:
        logits.masked_fill_(mask, -torch.inf)
    else:
        # gather and scatter, which would be three times as slow for all rows
        logits[rows] = logits[rows].masked_fill(mask, -torch.inf)
