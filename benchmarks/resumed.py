"""Requests that come back after new weights, as after a train step: what it costs to fill in their KV.

Groups of requests with one prompt each sample some tokens, are interrupted, and come back under new weights
with what was sampled behind their prompts. `whole_prompts` is the baseline of the same run: the same requests
as if all of their tokens were a prompt (position 0), no two of which are equal. Tokens are those of passes
that fill KV, padding included; CPU seconds are those of these passes, on one thread. Predicted for a model of
135M parameters: 0.30 of the tokens, 0.32 of the CPU seconds. Prints one JSON line.

    python -m benchmarks.resumed [--size 100m]
"""

from __future__ import annotations

import json
import tempfile
import time
from typing import Any

import torch
import typer
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from benchmarks.engines import SIZES
from sf_core.engines.protocol import StepEngine
from sf_core.engines.torch.cached_model import DecoderModel
from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.testing.engines import awake, drain
from sf_core.types import GenerationRequest, Sampling, WeightsRef

PREDICTED = {"token_ratio": 0.30, "cpu_ratio": 0.32}


class Filling:
    """The passes that fill KV, from when this is made."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.cpu_s = 0.0
        fill = DecoderModel.prefill

        def measure(model: DecoderModel, cache: Any, ids: torch.Tensor, *places: torch.Tensor) -> None:
            began = time.process_time()
            fill(model, cache, ids, *places)
            self.cpu_s += time.process_time() - began
            self.num_tokens += ids.numel()

        DecoderModel.prefill = measure  # type: ignore[assignment, method-assign]

    def take(self) -> dict[str, float]:
        """What was measured since the last time."""
        found = {"tokens": self.num_tokens, "cpu_s": round(self.cpu_s, 2)}
        self.num_tokens = 0
        self.cpu_s = 0.0
        return found


def main(
    size: str = "100m",
    groups: int = 16,
    group_size: int = 8,
    prompt_tokens: int = 55,
    longest: int = 24,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    config = Qwen3Config(
        tie_word_embeddings=True, eos_token_id=None, max_position_embeddings=1024, **SIZES[size]
    )
    context = prompt_tokens + longest + 1
    requests = make_requests(SIZES[size]["vocab_size"], groups, group_size, prompt_tokens, longest)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        engine = TorchEngine(folder, max_running=len(requests), context_length=context)
        awake(engine, WeightsRef(0, folder))
        filling = Filling()
        sides = {
            "whole_prompts": [replace(request, position=0) for request in requests],
            "ours": requests,
        }
        found: dict[str, Any] = {}
        for version, (name, resumed) in enumerate(sides.items(), 1):
            awake(engine, WeightsRef(version, folder))
            filling.take()
            fill_all(engine, resumed)
            found[name] = filling.take()
        engine.close()
    ours = found["ours"]
    baseline = found["whole_prompts"]
    line = {
        "parameters": size,
        "requests": len(requests),
        **found,
        "token_ratio": round(ours["tokens"] / baseline["tokens"], 2),
        "cpu_ratio": round(ours["cpu_s"] / baseline["cpu_s"], 2),
        "predicted": PREDICTED,
    }
    print(json.dumps(line))


def make_requests(
    vocab_size: int, groups: int, group_size: int, prompt_tokens: int, longest: int
) -> list[GenerationRequest]:
    """Requests that come back after 1 to `longest` sampled tokens, and sample one more."""
    requests: list[GenerationRequest] = []
    for group in range(groups):
        prompt = torch.randint(0, vocab_size, (prompt_tokens,)).tolist()
        for _ in range(group_size):
            sampled = torch.randint(0, vocab_size, (int(torch.randint(1, longest + 1, ())),)).tolist()
            name = f"{group}.{len(requests)}"
            sampling = Sampling(seed=len(requests))
            requests.append(GenerationRequest(name, [*prompt, *sampled], len(sampled), 1, (), sampling))
    return requests


def fill_all(engine: StepEngine, requests: list[GenerationRequest]) -> None:
    for request in requests:
        engine.submit(request)
    assert sum(len(chunk.token_ids) for chunk in drain(engine)) == len(requests)


if __name__ == "__main__":
    typer.run(main)
