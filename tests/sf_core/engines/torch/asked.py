"""Requests to an engine on torch, and its answers."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from sf_core.engines.torch.torch_engine import TorchEngine
from sf_core.testing.engines import awake
from sf_core.types import Chunk, GenerationRequest, Sampling, WeightsRef

GREEDY = Sampling(temperature=0)


def engine_of(
    folder: str,
    max_running: int = 8,
    context_length: int = 100,
    kv_on_update: Literal["recompute", "keep"] = "recompute",
    dtype: torch.dtype = torch.float32,
) -> TorchEngine:
    """An engine that holds the folder's weights as version 0."""
    engine = TorchEngine(
        folder, max_running=max_running, context_length=context_length, kv_on_update=kv_on_update, dtype=dtype
    )
    take(engine, folder, 0)
    return engine


def take(engine: TorchEngine, folder: str, version: int) -> list[Chunk]:
    """Have the engine take the folder's weights, and wait until it has, without a token sampled meanwhile."""
    engine.pause()
    chunks = awake(engine, WeightsRef(version, folder))
    engine.resume()
    return chunks


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 30,
    sampling: Sampling = GREEDY,
    stop_token_ids: tuple[int, ...] = (),
    stream: bool = False,
) -> GenerationRequest:
    return GenerationRequest(name, prompt, 0, max_tokens, stop_token_ids, sampling, stream)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]


def finish(
    engine: TorchEngine, requests: list[GenerationRequest]
) -> dict[str, tuple[list[int], list[float]]]:
    """Token ids and log-probs by request."""
    for r in requests:
        engine.submit(r)
    done: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    while engine.num_requests:
        for chunk in engine.step():
            done[chunk.request_id][0].extend(chunk.token_ids)
            done[chunk.request_id][1].extend(chunk.logprobs)
    return done


@cache
def rounded(folder: str, dtype: torch.dtype) -> Any:
    """The model of the folder in float32, of weights that were rounded to `dtype`."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float()


def full_logprobs(folder: str, r: GenerationRequest, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Log-probs that a pass over all of it gives, of weights that were rounded to `dtype`."""
    model = rounded(folder, dtype)
    ids = torch.tensor([[*r.prompt_ids, *tokens]])
    with torch.no_grad():
        logits = model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
    scored: torch.Tensor = logits.log_softmax(-1)[range(len(tokens)), tokens]
    return scored
