"""The torch engine, vLLM behind our engine, vLLM by its bare endpoint, and transformers' `generate`, on the
same load: the samples of a GRPO batch. Needs `make vllm`, or sides without it. Prints one JSON line.

    python -m benchmarks.engines [--size 1m] [--side ours --side transformers]

Folder, float32, threads and lengths are the same for all. Two loads: samples that end at different lengths,
as those of agents do (uniform from an eighth of the longest to the longest), and samples of the longest
length. Sides alternate; the first round warms up, the best of the others counts, in tokens per second of wall
time. ratio: ours over `generate`; ratio_vllm: ours over vLLM behind our engine; adapter_cost: the share of
the bare endpoint's speed that our engine loses. logprob_difference: to a full forward pass of transformers.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import aiohttp
import psutil
import torch
import typer
from transformers import AutoModelForCausalLM, Qwen3Config, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from sf_core.config import RunConfig
from sf_core.engines.protocol import StepEngine
from sf_core.engines.registry import make_engine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake, drain
from sf_core.types import GenerationRequest, Sampling, WeightsRef

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SIZES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SHAPE, shape, strict=True))
    for name, shape in {
        "1m": (152, 128, 4, 512, 4, 2, 32),
        "10m": (152, 384, 6, 1152, 6, 2, 64),
        "100m": (32_000, 640, 14, 2048, 10, 5, 64),
    }.items()
}

SIDES = ("ours", "transformers", "vllm", "vllm_bare")
COMPARED = 32
"""Samples whose log-probs are compared."""


@dataclass
class Load:
    vocab_size: int
    prompts: int
    samples: int
    prompt_tokens: int
    max_tokens: int
    varied: bool

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens to sample, for each sample."""
        shortest = self.max_tokens // 8 if self.varied else self.max_tokens
        return torch.randint(shortest, self.max_tokens + 1, (self.prompts * self.samples,)).tolist()

    def ids(self) -> list[list[int]]:
        """A prompt for each sample. New ones every time, because engines would have cached earlier ones."""
        ids = torch.randint(0, self.vocab_size, (self.prompts, self.prompt_tokens))
        return ids.repeat_interleave(self.samples, 0).tolist()

    def requests(self) -> list[GenerationRequest]:
        return [
            GenerationRequest(str(seed), prompt, 0, length, (), Sampling(seed=seed))
            for seed, (prompt, length) in enumerate(zip(self.ids(), self.lengths, strict=True))
        ]

    @property
    def sampled(self) -> int:
        return sum(self.lengths)


def main(
    size: Annotated[list[str] | None, typer.Option(help="1m, 10m, 100m; all by default")] = None,
    side: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SIDES)}; all by default")] = None,
    prompts: int = 32,
    samples: int = 16,
    prompt_tokens: int = 40,
    max_tokens: int = 64,
    max_running: int = 512,
    threads: int = 2,
    repeats: int = 3,
) -> None:
    torch.set_num_threads(threads)
    # the server's
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.disable_progress_bar()
    result: dict[str, Any] = {"threads": threads}
    for name in size or SIZES:
        vocab_size = SIZES[name]["vocab_size"]
        loads = {
            key: Load(vocab_size, prompts, samples, prompt_tokens, max_tokens, varied)
            for key, varied in (("varied_lengths", True), ("equal_lengths", False))
        }
        result[name] = compare(SIZES[name], loads, max_running, repeats, side or SIDES)
    print(json.dumps(result))


def compare(
    shape: dict[str, Any],
    loads: dict[str, Load],
    max_running: int,
    repeats: int,
    sides: Sequence[str],
) -> dict[str, Any]:
    torch.manual_seed(0)
    config = Qwen3Config(tie_word_embeddings=True, eos_token_id=None, max_position_embeddings=1024, **shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    load = next(iter(loads.values()))
    settings = {"max_running": max_running, "context_length": load.prompt_tokens + load.max_tokens}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        wants = {"torch": "ours" in sides, "vllm": any(side.startswith("vllm") for side in sides)}
        engines = {kind: made(kind, folder, settings) for kind, wanted in wants.items() if wanted}
        try:
            runs = {
                "ours": lambda load: run_engine(engines["torch"], load),
                "transformers": lambda load: run_transformers(model, load),
                "vllm": lambda load: run_engine(engines["vllm"], load),
                "vllm_bare": lambda load: asyncio.run(run_bare(load)),
            }
            chosen = {side: runs[side] for side in sides}
            result: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
            for key, each in loads.items():
                result[key] = rates(each, chosen, repeats)
            result["logprob_difference"] = {k: differences(e, model, load) for k, e in engines.items()}
        finally:
            for engine in engines.values():
                engine.close()
    return result


def made(kind: str, folder: str, settings: dict[str, int], dtype: str = "float32") -> StepEngine:
    # as the engine of a run, which samples fewer tokens than fit its context
    config = {"engine": {"kind": kind, **settings}, "policy": {"dtype": dtype}, "rollout": {"max_tokens": 1}}
    engine = DrivenEngine(make_engine(RunConfig.model_validate(config), folder))
    awake(engine, WeightsRef(0, folder))
    return engine


def rates(load: Load, runs: dict[str, Callable[[Load], None]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {side: [] for side in runs}
    for _ in range(1 + repeats):
        for side, run in runs.items():
            started = time.perf_counter()
            run(load)
            times[side].append(time.perf_counter() - started)
    rate = {side: load.sampled / min(seconds[1:]) for side, seconds in times.items()}
    result: dict[str, float] = {f"{side}_tokens_per_second": round(value) for side, value in rate.items()}
    for key, over, under in (("ratio", "ours", "transformers"), ("ratio_vllm", "ours", "vllm")):
        if over in rate and under in rate:
            result[key] = round(rate[over] / rate[under], 2)
    if "vllm" in rate and "vllm_bare" in rate:
        result["adapter_cost"] = round(1 - rate["vllm"] / rate["vllm_bare"], 3)
    return result


def run_engine(engine: StepEngine, load: Load) -> None:
    for request in load.requests():
        engine.submit(request)
    assert sum(len(chunk.token_ids) for chunk in drain(engine)) == load.sampled


async def run_bare(load: Load) -> None:
    """All requests at once, each with one whole answer."""
    connector = aiohttp.UnixConnector(server_socket(), limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(request: GenerationRequest) -> int:
            sampling = {
                "max_tokens": request.max_tokens,
                "temperature": 1.0,
                "seed": request.sampling.seed,
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": 0,
            }
            body = {"token_ids": request.prompt_ids, "sampling_params": sampling}
            async with session.post("http://vllm/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                (choice,) = (await response.json())["choices"]
                return len(choice["token_ids"])

        assert sum(await asyncio.gather(*map(ask, load.requests()))) == load.sampled


def server_socket() -> str:
    """The socket of the server that our engine has started."""
    commands = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    return next(command[command.index("--uds") + 1] for command in commands if "--uds" in command)


@torch.inference_mode()
def run_transformers(model: Any, load: Load) -> None:
    batch = torch.tensor(load.ids(), device=model.device)
    output = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=True,
        top_k=0,
        max_new_tokens=load.max_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([LengthReached(load)]),
    )
    assert output.shape[1] == load.prompt_tokens + max(load.lengths)


class LengthReached(StoppingCriteria):
    """Ends every sequence at its length, as an end-of-turn token would."""

    def __init__(self, load: Load) -> None:
        self._ends = load.prompt_tokens + torch.tensor(load.lengths)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return ids.shape[1] >= self._ends.to(ids.device)


@torch.inference_mode()
def differences(engine: StepEngine, model: Any, load: Load) -> dict[str, float]:
    requests = load.requests()[:COMPARED]
    for request in requests:
        engine.submit(request)
    chunks = drain(engine)
    found: list[float] = []
    for request in requests:
        own = [chunk for chunk in chunks if chunk.request_id == request.request_id]
        sampled = torch.tensor([token for chunk in own for token in chunk.token_ids])
        ids = torch.cat([torch.tensor(request.prompt_ids), sampled])
        scores = model(ids[None, :-1]).logits[0, load.prompt_tokens - 1 :].log_softmax(-1)
        expected = scores.gather(1, sampled[:, None])[:, 0]
        told = torch.tensor([logprob for chunk in own for logprob in chunk.logprobs])
        found += (told - expected).abs().tolist()
    return {"mean": sum(found) / len(found), "max": max(found)}


if __name__ == "__main__":
    typer.run(main)
