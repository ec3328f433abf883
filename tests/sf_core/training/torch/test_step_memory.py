"""What a train step of one rank takes, in the bytes of all tensors, against what `sf plan` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from sf_core.config import RunConfig
from sf_core.stages.preflight.sizes import PolicySizes
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.ranks import SingleRank
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trained_model import AdamSettings
from tests.bench import training
from tests.bench.engines.model_folders import write_tokenizer
from tests.bench.memory import Memory

SETTINGS = AdamSettings(learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
WITHIN = 0.03
RANK = 8
"""Columns of a factor."""


@dataclass(frozen=True)
class Phases:
    """Counts the bytes of all tensors that live during a step."""

    before: int
    held: int
    """In the first micro-batch, when its loss is computed."""
    passed: int
    """In the second micro-batch: gradients of the first one are there."""
    peak: int
    """The most in the passes, until the gradients have reached the parameters."""
    given: int
    """When the gradients have reached the parameters."""
    update: int
    """The most in the update."""


def step(model: TorchModel) -> Phases:
    """The second step of the model: Adam's moments exist."""
    rows = read_rows(
        training.batches.make_batch(
            training.batches.grouped_rows(num_groups=2, group_size=1, prompt=2, sampled=2)
        )
    )
    # activations take next to nothing
    microbatches = list(pack(rows, Packing(4)))
    assert len(microbatches) == 2
    in_losses: list[int] = []
    with Memory() as memory:
        for parameter in model.network.model.parameters():
            memory.count(parameter.data)

        def loss(microbatch: Any, logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            in_losses.append(memory.held)
            return -(logprobs * microbatch.advantages).sum()

        model.forward_backward(microbatches, loss)
        model.update(SETTINGS)
        in_losses.clear()
        memory.peak = before = memory.held
        model.forward_backward(microbatches, loss)
        peak = memory.peak
        given = memory.held
        memory.peak = memory.held
        model.update(SETTINGS)
        return Phases(before, in_losses[0], in_losses[1], peak, given, memory.peak)


def save_model(folder: Path, *, is_tied: bool) -> str:
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        tie_word_embeddings=is_tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)
    template = "{% for message in messages %}{{ message.content }}<end>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8")
    return str(folder)


def sizes_of(folder: str, dtype: str, **train: Any) -> PolicySizes:
    config = RunConfig.model_validate({"policy": {"model": folder, "dtype": dtype}, "train": train})
    sizes = PolicySizes.of(config)
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("dtype", "held_bytes"), [("float32", 2.5), ("bfloat16", 2.0)])
def test_bytes_of_a_step_of_all_weights_are_those_that_the_plan_says(
    tmp_path: Path, dtype: Any, held_bytes: float, is_tied: bool
) -> None:
    folder = save_model(tmp_path, is_tied=is_tied)
    sizes = sizes_of(folder, dtype)
    phases = step(TorchModel(folder, SingleRank(), dtype=dtype))
    number = sizes.parameters
    assert phases.before / number == pytest.approx(12, rel=WITHIN)
    assert phases.held / number == pytest.approx(12 + held_bytes, rel=WITHIN)
    assert phases.passed == pytest.approx(sizes.rank, rel=WITHIN)
    assert phases.passed / number == pytest.approx(16 + held_bytes, rel=WITHIN)
    assert phases.peak == pytest.approx(sizes.rank + sizes.largest, rel=WITHIN)
    # optimiser and parameters, and the last layer's fused weights
    assert phases.given / number == pytest.approx(16.4, rel=WITHIN)
    assert phases.update <= phases.given * (1 + WITHIN)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_of_a_step_of_an_adapter_are_those_that_the_plan_says(
    tmp_path: Path, dtype: Any, itemsize: int, is_tied: bool
) -> None:
    folder = save_model(tmp_path, is_tied=is_tied)
    training.adapters.draw_adapter(training.adapters.adapter_of(folder), folder, rank=RANK)
    model = TorchModel(folder, SingleRank(), dtype=dtype, adapter=training.adapters.adapter_of(folder))
    sizes = sizes_of(folder, dtype, lora={"rank": RANK})
    phases = step(model)
    assert sizes.adapter is not None
    factors = sizes.adapter.parameters
    frozen = itemsize * sizes.parameters
    assert phases.before == pytest.approx(12 * factors + frozen, rel=WITHIN)
    assert phases.given == pytest.approx(sizes.rank, rel=WITHIN)
    # the factors are rounded and fused once for each pass
    assert phases.peak <= (sizes.rank + 2 * itemsize * factors) * (1 + WITHIN)
