"""Supervised start of the built-in policy: imitate generated demonstrations of the training split.

Owns rendering and the optimisation. What a demonstration says is the environment's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sf_core.config import WarmstartConfig
from sf_core.environments.quickstart import Demonstration, demonstrate

BETAS = (0.9, 0.95)
NOT_TRAINED = -100


def warmstart(folder: str, config: WarmstartConfig, seed: int) -> None:
    """Train the policy in the folder and save it back. Deterministic in the seed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0, fused=True)
    for step, examples in enumerate(_batches(tokenizer, config, seed)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        ids, labels = _pad(examples)
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        trained = labels != NOT_TRAINED
        logits = model.get_output_embeddings()(hidden[trained])
        torch.nn.functional.cross_entropy(logits, labels[trained]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def learning_rate(config: WarmstartConfig, step: int) -> float:
    """Rises over a twentieth of the steps, then falls to a tenth of its peak along a cosine."""
    rise = max(1, config.steps // 20)
    if step < rise:
        return config.learning_rate * (step + 1) / rise
    progress = (step - rise) / max(1, config.steps - rise)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def _batches(tokenizer: Any, config: WarmstartConfig, seed: int) -> Iterator[list[Example]]:
    for step in range(config.steps):
        first = step * config.batch_size
        yield [encode(tokenizer, demonstrate(first + i, seed)) for i in range(config.batch_size)]


Example = tuple[list[int], list[bool]]
"""Token ids, and which of them the assistant says."""


def encode(tokenizer: Any, demonstration: Demonstration) -> Example:
    """Ids as the policy will meet them: every turn is encoded by itself, cut behind its end mark."""
    ids: list[int] = []
    said: list[bool] = []
    done = ""

    def extend(text: str, by_assistant: bool) -> None:
        nonlocal done
        new = tokenizer.encode(text[len(done) :], add_special_tokens=False)
        ids.extend(new)
        said.extend([by_assistant] * len(new))
        done = text

    def render(count: int, **options: Any) -> str:
        return tokenizer.apply_chat_template(
            demonstration.messages[:count], tools=demonstration.tools, tokenize=False, **options
        )

    for i, message in enumerate(demonstration.messages):
        if message["role"] == "assistant":
            extend(render(i, add_generation_prompt=True), by_assistant=False)
            turn = render(i + 1)
            extend(turn[: turn.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)], by_assistant=True)
    return ids, said


def _pad(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [B, T] padded on the right, and labels [B, T]: the next token where the assistant says it."""
    width = max(len(ids) for ids, _ in examples) - 1
    inputs = np.zeros((len(examples), width), dtype=np.int64)
    labels = np.full((len(examples), width), NOT_TRAINED, dtype=np.int64)
    for row, (ids, said) in enumerate(examples):
        inputs[row, : len(ids) - 1] = ids[:-1]
        labels[row, : len(ids) - 1] = np.where(said[1:], ids[1:], NOT_TRAINED)
    return torch.from_numpy(inputs), torch.from_numpy(labels)
