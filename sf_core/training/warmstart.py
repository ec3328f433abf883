"""Supervised start of the built-in policy: imitate generated demonstrations of the training split.

Owns rendering and optimisation; the environment decides what a demonstration says.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from sf_core.config import WarmstartConfig
from sf_core.environments.environment import Demonstration, Environment
from sf_core.training.packing import SAMPLING, Row, pack
from sf_core.training.torch.network import Network

BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
TOKENS_PER_MICROBATCH = 8192


def warmstart(folder: str, config: WarmstartConfig, environment: Environment, seed: int) -> None:
    """Train the policy in the folder and save it back. A function of the folder, the config, the environment
    and the seed."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    network = Network(folder)
    parameters = list(network.model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=0.0, fused=True)
    order = np.random.default_rng(seed).permutation(config.steps * config.batch_size)
    for step, indices in enumerate(order.reshape(config.steps, config.batch_size)):
        demonstrations = [environment.demonstrate(int(index)) for index in indices]
        rows = [encode(tokenizer, shown) for shown in demonstrations if shown is not None]
        total = sum(int(row.loss_mask.sum()) for row in rows)
        for microbatch in pack(rows, TOKENS_PER_MICROBATCH):
            loss = torch.nn.functional.cross_entropy(
                network.logits(microbatch),
                microbatch.targets,
                reduction="sum",
                label_smoothing=config.label_smoothing,
            )
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        optimizer.zero_grad()
    network.model.save_pretrained(folder)


def learning_rate(config: WarmstartConfig, step: int) -> float:
    """Rate that rises over a twentieth of the steps, then falls to a tenth of its peak along a cosine."""
    rise = max(1, config.steps // 20)
    if step < rise:
        return config.learning_rate * (step + 1) / rise
    progress = (step - rise) / max(1, config.steps - rise)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def encode(tokenizer: Any, demonstration: Demonstration) -> Row:
    """A demonstration as the policy would have produced it: all the assistant's tokens are trained, end marks
    included, and every turn is encoded by itself, as in a session."""
    ids: list[int] = []
    said: list[bool] = []
    rendered = ""

    def extend(text: str, by_assistant: bool) -> None:
        nonlocal rendered
        new = tokenizer.encode(text[len(rendered) :], add_special_tokens=False)
        ids.extend(new)
        said.extend([by_assistant] * len(new))
        rendered = text

    def render(count: int, **options: Any) -> str:
        return tokenizer.apply_chat_template(
            demonstration.messages[:count], tools=demonstration.tools, tokenize=False, **options
        )

    for i, message in enumerate(demonstration.messages):
        if message["role"] == "assistant":
            extend(render(i, add_generation_prompt=True), by_assistant=False)
            turn = render(i + 1)
            extend(turn[: turn.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)], by_assistant=True)
    nothing = np.zeros(len(ids), dtype=np.float32)
    return Row(
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(said),
        logprobs=nothing,
        advantages=nothing,
        policy_versions=np.zeros(len(ids), dtype=np.int32),
        sampling=np.zeros(len(ids), SAMPLING),
        weights=np.ones(len(ids), dtype=np.float32),
        group="",
        session="",
    )
