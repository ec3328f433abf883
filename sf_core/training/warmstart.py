"""Warm start of the built-in policy, which has learned nothing before: imitate demonstrations, in one process
and within half a minute. A model of the user's is trained as a run of its own (stages/warmstart.py).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from sf_core.config import RunConfig, WarmstartConfig
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.training.demonstrations import RATE_OF_BUILT_IN, Shown, demonstrations, encode
from sf_core.training.packing import SAMPLING, Row, pack
from sf_core.training.torch.network import Network

BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
TOKENS_PER_MICROBATCH = 8192

LABEL_SMOOTHING = 0.18
"""What the setting means if it is empty."""


def warmstart(folder: str, config: RunConfig) -> None:
    """Train the policy in the folder and save it back. A function of the folder, the settings of policy and
    environment, and the seed."""
    warm, steps = config.policy.warmstart, config.policy.warm_steps
    assert warm is not None
    smoothing = LABEL_SMOOTHING if warm.label_smoothing is None else warm.label_smoothing
    renderer, network = open_renderer(folder), Network(folder)
    parameters = list(network.model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=0.0, fused=True)
    for step, shown in enumerate(demonstrations(config, range(steps))):
        rows = [row_of(encode(renderer, one)) for one in shown]
        total = sum(int(row.loss_mask.sum()) for row in rows)
        for microbatch in pack(rows, TOKENS_PER_MICROBATCH):
            loss = torch.nn.functional.cross_entropy(
                network.logits(microbatch), microbatch.targets, reduction="sum", label_smoothing=smoothing
            )
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(warm, steps, step)
        optimizer.step()
        optimizer.zero_grad()
    network.model.save_pretrained(folder)


def learning_rate(config: WarmstartConfig, steps: int, step: int) -> float:
    """Rate that rises over a twentieth of the steps, then falls to a tenth of its peak along a cosine."""
    peak, rise = config.learning_rate or RATE_OF_BUILT_IN, max(1, steps // 20)
    if step < rise:
        return peak * (step + 1) / rise
    progress = (step - rise) / max(1, steps - rise)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def row_of(shown: Shown) -> Row:
    """A training row of which only tokens and mask count."""
    nothing = np.zeros(shown.token_ids.size, dtype=np.float32)
    return Row(
        token_ids=shown.token_ids,
        loss_mask=shown.said,
        logprobs=nothing,
        advantages=nothing,
        policy_versions=np.zeros(shown.token_ids.size, dtype=np.int32),
        sampling=np.zeros(shown.token_ids.size, SAMPLING),
        weights=np.ones(shown.token_ids.size, dtype=np.float32),
        group="",
        session="",
    )
