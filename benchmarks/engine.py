"""The torch engine against transformers' `generate` on the same load: the samples of a GRPO batch.

Two loads: samples that end at different lengths, as those of agents do (uniform from an eighth of the longest
to the longest, the same for both sides), and samples that all have the longest length. Prints one JSON line:
for each, tokens per second of wall time (best of the repeats, which alternate, after one warm-up) and the
ratio; `ratio_cpu` compares CPU seconds instead, which a busy machine disturbs less.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, Qwen3Config, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.types import GenerationRequest, Sampling

VOCAB_SIZE = 152
SIZES: dict[str, dict[str, Any]] = {
    "1m": dict(
        hidden_size=128, num_hidden_layers=4, intermediate_size=512, num_attention_heads=4, head_dim=32
    ),
    "10m": dict(
        hidden_size=384, num_hidden_layers=6, intermediate_size=1152, num_attention_heads=6, head_dim=64
    ),
}


@dataclass
class Load:
    prompts: int
    samples: int
    prompt_tokens: int
    max_tokens: int
    varied: bool

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[prompts * samples], tokens to sample."""
        shape = (self.prompts * self.samples,)
        return torch.randint(
            self.max_tokens // 8 if self.varied else self.max_tokens, self.max_tokens + 1, shape
        )

    def ids(self) -> torch.Tensor:
        """[prompts, prompt_tokens]"""
        return torch.randint(0, VOCAB_SIZE, (self.prompts, self.prompt_tokens))

    @property
    def sampled(self) -> int:
        return int(self.lengths.sum())


def main(
    size: Annotated[list[str] | None, typer.Option(help="1m, 10m; both by default")] = None,
    prompts: int = 32,
    samples: int = 16,
    prompt_tokens: int = 40,
    max_tokens: int = 64,
    max_running: int = 512,
    threads: int = 1,
    repeats: int = 3,
) -> None:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    loads = {
        name: Load(prompts, samples, prompt_tokens, max_tokens, varied)
        for name, varied in (("varied_lengths", True), ("equal_lengths", False))
    }
    result: dict[str, Any] = {"threads": threads, "max_running": max_running}
    for name in size or SIZES:
        result[name] = {kind: compare(name, load, max_running, repeats) for kind, load in loads.items()}
    print(json.dumps(result))


def compare(size: str, load: Load, max_running: int, repeats: int) -> dict[str, float]:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=None,
        **SIZES[size],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        context_length = load.prompt_tokens + load.max_tokens
        engine = TorchEngine(folder, max_running=max_running, context_length=context_length)
    # new prompts every time, because the engine would have cached earlier ones
    runs = {
        "ours": lambda: run_engine(engine, load.ids(), load),
        "transformers": lambda: run_transformers(model, load.ids(), load),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(1 + repeats):
        for name, run in runs.items():
            times[name].append(measure(run))
    wall, cpu = (
        {name: load.sampled / min(t[clock] for t in times[name][1:]) for name in runs} for clock in (0, 1)
    )
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **{f"{name}_tokens_per_second": round(rate) for name, rate in wall.items()},
        "ratio": round(wall["ours"] / wall["transformers"], 2),
        "ratio_cpu": round(cpu["ours"] / cpu["transformers"], 2),
    }


def measure(run: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of a run."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def run_engine(engine: TorchEngine, ids: torch.Tensor, load: Load) -> None:
    prompts = ids.repeat_interleave(load.samples, 0).tolist()
    for seed, (prompt, length) in enumerate(zip(prompts, load.lengths.tolist(), strict=True)):
        engine.submit(GenerationRequest(str(seed), prompt, 0, length, (), Sampling(seed=seed)))
    sampled = 0
    while engine.num_requests:
        sampled += sum(len(chunk.token_ids) for chunk in engine.step())
    assert sampled == load.sampled


@torch.inference_mode()
def run_transformers(model: Any, ids: torch.Tensor, load: Load) -> None:
    batch = ids.repeat_interleave(load.samples, 0)
    output = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=True,
        top_k=0,
        max_new_tokens=load.max_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([LengthReached(load)]),
    )
    assert output.shape[1] == load.prompt_tokens + load.max_tokens


class LengthReached(StoppingCriteria):
    """Ends every sequence at its length, as an end-of-turn token would."""

    def __init__(self, load: Load) -> None:
        self._ends = load.prompt_tokens + load.lengths

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return ids.shape[1] >= self._ends


if __name__ == "__main__":
    typer.run(main)
