"""Logits of answers that follow a grammar. Loaded by vLLM's processes too (vllm/grammar_processor.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sf_core.engines.grammar import Following, find_forbidden


def mask_forbidden(logits: torch.Tensor, rows: Sequence[int], answers: Sequence[Following]) -> None:
    """Set the logits of forbidden tokens to -inf, in these rows of logits [B, V]. All answers are of one
    vocabulary."""
    mask = torch.from_numpy(find_forbidden(answers, logits.shape[1])).to(logits.device)
    if [*rows] == [*range(len(logits))]:
        logits.masked_fill_(mask, -torch.inf)
    else:
        # gathered and scattered, which is three times as dear for all of them
        logits[rows] = logits[rows].masked_fill(mask, -torch.inf)
