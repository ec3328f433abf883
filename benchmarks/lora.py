"""What an adapter takes, of rank 32 and all linear layers, against all weights: bytes, memory, seconds, and
tokens per second of the engines. Prints one JSON line.

    python -m benchmarks.lora [--vllm]

Predicted before the first run, for two cores without a GPU, in bfloat16:

bytes: of 1.7B parameters a version has 70 MB for 3.4 GB, and a checkpoint 0.42 GB for 20.6 GB; of 8B 175 MB
for 16.4 GB, and 1.05 GB for 98 GB. By arithmetic, of headers and shapes; off_bytes, what that misses the real
files of 13M parameters by, is 0.

peak_mb: 106M parameters: 450 above the process without a model, for 2,200. The weights take 210; gradients,
moments and what is published are those of the factors.

forward_backward_s: 13M parameters, rows of 1,536 tokens: 0.87 of the CPU seconds, as a prototype in float32
took, because no gradients of the weights are computed and products with the factors are added.

standstill_s: 13M parameters: 0.005 for 0.015. Factors are fused between two steps, while a whole model is
packed beside them. vLLM: 0.05 for 0.1.

tokens_per_second: 13M parameters: 0.8 of those without an adapter, since products with the factors are a
quarter of the work at a width of 384. vLLM: 0.75.

Sides alternate, medians count, and a ratio is the median of those of pairs. peak_mb is of a process for each
side, which makes two steps and publishes both. standstill_s is as in benchmarks/weights.py, with the KV of
running requests kept, by vLLM computed anew; the engine of the full side reads what has changed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config
from transformers.utils import logging

from benchmarks.engines import Load, run_engine
from benchmarks.gpu import SHAPES
from benchmarks.peers.trl_step import Meter, resident_bytes
from benchmarks.weights import batch, make_trainer, publish_versions, standstill, store_start
from sf_core.config import PolicyConfig, RunConfig
from sf_core.engines.registry import make_engine
from sf_core.models.adapter import Adapter, list_linears, shape_factors
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Microbatch, Packing, share
from sf_core.training.torch.trained_model import AdamSettings
from sf_core.types import WeightsRef
from storage.run_directory import RunDirectory
from storage.tensors.checkpoints import PARTS, SLICES_KEY
from storage.tensors.tensor_bytes import Header
from storage.tensors.torch_bytes import entry_of
from storage.tensors.weights import ADAPTER_NAME, DIGEST, FILE_NAME

TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
SIDES: dict[str, Adapter | None] = {"full": None, "lora": Adapter(32, 64.0, TARGETS)}

POLICY = PolicyConfig(hidden_size=384, num_layers=6, dtype="bfloat16")
LARGE_POLICY = PolicyConfig(hidden_size=768, num_layers=12, dtype="bfloat16")

MODELS = {
    "1.7b": Qwen3Config(**SHAPES["qwen3-1.7b"], tie_word_embeddings=True),
    "8b": Qwen3Config(
        **SHAPES["qwen3-1.7b"]
        | {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288}
        | {"num_attention_heads": 32, "tie_word_embeddings": False}
    ),
}

KV = {"torch": "keep", "vllm": "recompute"}
"""What becomes of the KV of running requests. vLLM keeps none for another adapter."""

LOAD = Load(vocab_size=100, prompts=4, samples=16, prompt_tokens=40, max_tokens=64, varied=True)
STILL = AdamSettings(learning_rate=0.0, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)


def main(
    vllm: Annotated[bool, typer.Option("--vllm", help="Also vLLM; needs `make vllm`.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of measurements.")] = 6,
) -> None:
    torch.set_num_threads(threads)
    # the server's
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.disable_progress_bar()
    kinds = ("torch", "vllm") if vllm else ("torch",)
    with tempfile.TemporaryDirectory() as temporary:
        runs = {side: RunDirectory(f"{temporary}/{side}/run") for side in SIDES}
        for side, run in runs.items():
            publish_versions(run, POLICY, SIDES[side])
        line = {
            "benchmark": "lora",
            "threads": threads,
            "bytes": {
                name: {side: sizes(model, SIDES[side]) for side in SIDES} for name, model in MODELS.items()
            },
            "off_bytes": {side: off_bytes(run, SIDES[side]) for side, run in runs.items()},
            "peak_mb": {side: peak_mb(f"{temporary}/{side}/large", SIDES[side]) for side in SIDES},
            "forward_backward_s": alternate(
                {side: forward_backward(run) for side, run in runs.items()}, rounds
            ),
            "standstill_s": {
                kind: {
                    side: round(standstill(run, POLICY, "pulled_delta", KV[kind], make_engine, kind), 4)
                    for side, run in runs.items()
                }
                for kind in kinds
            },
            "tokens_per_second": {kind: tokens_per_second(runs, kind, rounds) for kind in kinds},
        }
    print(json.dumps(line))


def sizes(model: PreTrainedConfig, adapter: Adapter | None) -> dict[str, int]:
    """Sizes in bytes: the file of a version, and the shard of a checkpoint on one rank."""
    if adapter is not None:
        shapes = dict(shape_factors(adapter, list_linears(model.to_dict())))
    else:
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(model)
        shapes = {name: parameter.shape for name, parameter in made.named_parameters()}
    masters = {f"{part}/{name}": shape for part in PARTS for name, shape in shapes.items()}
    places = {name: {"saved_offsets": (0,) * len(shape), "shape": shape} for name, shape in masters.items()}
    of_version = {"format": "pt", "version": "1", DIGEST: "0" * 64}
    return {
        "version": file_bytes(of_version, dict(sorted(shapes.items())), torch.bfloat16),
        "checkpoint": file_bytes({"format": "pt", SLICES_KEY: json.dumps(places)}, masters, torch.float32),
    }


def file_bytes(metadata: dict[str, str], shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> int:
    """Size of a safetensors file with tensors of these shapes."""
    header = Header(metadata, {})
    for name in shapes:
        header.entries[name] = entry_of(
            torch.empty(shapes[name], dtype=dtype, device="meta"), header.data_bytes
        )
    return len(header.encode()) + header.data_bytes


def off_bytes(run: RunDirectory, adapter: Adapter | None) -> dict[str, int]:
    """What `sizes` says beyond the real sizes."""
    said = sizes(AutoConfig.from_pretrained(run.start_dir), adapter)
    trainer = make_trainer(run, POLICY)
    trainer.step(batch(1))
    trainer.save_checkpoint(run.checkpoint_dir(1))
    trainer.await_checkpoint()
    name = FILE_NAME if adapter is None else ADAPTER_NAME
    real = {
        "version": os.path.getsize(f"{run.weights_dir(1)}/{name}"),
        "checkpoint": os.path.getsize(f"{run.checkpoint_dir(1)}/shard-1-of-1.safetensors"),
    }
    return {key: said[key] - real[key] for key in real}


def peak_mb(uri: str, adapter: Adapter | None) -> float:
    """Resident memory of a trainer above that of its process before it."""
    store_start(RunDirectory(uri), LARGE_POLICY, adapter)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(train_large, uri, torch.get_num_threads()).result()


def train_large(uri: str, threads: int) -> float:
    torch.set_num_threads(threads)
    run = RunDirectory(uri)
    meter = Meter(1, resident_bytes())
    trainer = make_trainer(run, LARGE_POLICY)
    for version in (1, 2):
        meter.begin()
        trainer.step(batch(version))
        trainer.save_weights(run.weights_dir(version), run.version_dir(version - 1))
        meter.end()
    return meter.line()["peak_mb"]


def forward_backward(run: RunDirectory) -> Callable[[], float]:
    """Measures the CPU seconds of both passes over a batch."""
    model = make_trainer(run, POLICY).model
    rows = share(read_rows(batch(0, tokens=192)), 0, 1, Packing(1 << 20))

    def loss(microbatch: Microbatch, logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return -(logprobs * microbatch.advantages).sum()

    def measure() -> float:
        began = time.process_time()
        model.forward_backward(rows, loss)
        seconds = time.process_time() - began
        # drops the gradients
        model.update(STILL)
        return seconds

    return measure


def tokens_per_second(runs: Mapping[str, RunDirectory], kind: str, rounds: int) -> dict[str, float]:
    engines = {side: hold_version(run, 1, kind, lora=side == "lora") for side, run in runs.items()}

    def measure(engine: DrivenEngine) -> float:
        began = time.perf_counter()
        run_engine(engine, LOAD)
        return LOAD.sampled / (time.perf_counter() - began)

    found = alternate({side: partial(measure, engine) for side, engine in engines.items()}, rounds)
    for engine in engines.values():
        engine.close()
    return found


def hold_version(run: RunDirectory, version: int, kind: str, *, lora: bool) -> DrivenEngine:
    """An engine that holds a version of a run."""
    length = LOAD.prompt_tokens + LOAD.max_tokens
    settings = {"kind": kind, "max_running": LOAD.prompts * LOAD.samples, "context_length": length}
    config = RunConfig.model_validate(
        {
            "policy": POLICY,
            "engine": settings,
            "rollout": {"max_tokens": 1},
            "train": {"lora": {}} if lora else {},
        }
    )
    engine = DrivenEngine(make_engine(config, run.start_dir))
    awake(engine, WeightsRef(version, run.version_dir(version)))
    return engine


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians by side, and of the ratios of pairs; the first pair warms up."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(1 + rounds):
        for side in sorted(sides, reverse=number % 2 == 1):
            found[side].append(sides[side]())
    ratios = [lora / full for lora, full in zip(found["lora"][1:], found["full"][1:], strict=True)]
    medians = {side: round(statistics.median(values[1:]), 3) for side, values in found.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3)}


if __name__ == "__main__":
    typer.run(main)
