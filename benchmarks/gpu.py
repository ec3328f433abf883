"""Engine and trainer on one GPU at the shapes of real models with random weights. One JSON line for each
part, as it ends; each takes less than three minutes.

    python -m benchmarks.gpu [--part engine --shape qwen3-0.6b]

engine: tokens per second of the torch engine in bfloat16, and of transformers' `generate` on the same
samples, of which every length between an eighth of the longest and the longest is as likely. trainer: tokens
per second and peak memory of a step in bfloat16, and of a plain step: float32 weights under autocast,
log-softmax over all logits, in microbatches of the same tokens. handover: seconds to give the device from the
trainer to the engine and back, and to load a version that is in host memory. `tiny` is a shape to try the
script with, also on a CPU."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.engines import Load, made, rates, run_engine, run_transformers
from sf_core.config import TrainConfig
from sf_core.engines.torch.torch_engine import local_device
from sf_core.testing.engines import awake
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from sf_core.types import WeightsRef
from tests.bench.training.batches import grouped_rows, make_batch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "qwen3-0.6b": {"vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28}
    | {"intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3-1.7b": {"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 28}
    | {"intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
PARTS = ("engine", "trainer", "handover")
TRAINED = {"num_groups": 8, "group_size": 8, "prompt": 128, "sampled": 512}
TOKENS_PER_MICROBATCH = 16_384


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; all by default")] = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SHAPES)}")] = None,
    max_tokens: Annotated[int, typer.Option(help="sampled by the longest request")] = 512,
) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for name in shape or ("qwen3-0.6b", "qwen3-1.7b"):
        with tempfile.TemporaryDirectory() as folder:
            make_model(SHAPES[name], folder)
            parts = {
                "engine": partial(engine, folder, SHAPES[name]["vocab_size"], max_tokens),
                "trainer": partial(trainer, folder, SHAPES[name]["vocab_size"]),
                "handover": partial(handover, folder, SHAPES[name]["vocab_size"]),
            }
            for each in part or PARTS:
                print(json.dumps({"part": each, "shape": name, "device": device} | parts[each]()), flush=True)


def make_model(shape: dict[str, Any], folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(tie_word_embeddings=True, eos_token_id=None, max_position_embeddings=4096, **shape)
    with torch.device(local_device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def engine(folder: str, vocab_size: int, max_tokens: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for requests in (64, 256):
        load = Load(vocab_size, requests // 8, 8, 128, max_tokens, varied=True)
        settings = {"max_running": requests, "context_length": 128 + max_tokens}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(local_device()).eval()
        ours = made("torch", folder, settings, dtype="bfloat16")
        runs: dict[str, Callable[[Load], None]] = {
            "ours": partial(run_engine, ours),
            "transformers": partial(run_transformers, model),
        }
        result[f"{requests}_requests"] = rates(load, runs, repeats=1)
        ours.close()
    return result


def trainer(folder: str, vocab_size: int) -> dict[str, Any]:
    batch = make_batch(grouped_rows(**TRAINED, vocabulary=vocab_size), logprob=-10.0, group_size=8)
    ours = timed(partial(our_step, make_trainer(folder), batch))
    plain = timed(PlainTrainer(folder, batch).step)
    ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
    return {"ours": ours, "plain": plain, "speed_ratio": round(ratio, 2)}


def make_trainer(folder: str) -> ModelTrainer:
    make = partial(TorchModel, folder, device=local_device(), dtype="bfloat16")
    config = TrainConfig(tokens_per_microbatch=TOKENS_PER_MICROBATCH)
    return ModelTrainer(make, config, seed=0, dtype="bfloat16")


def our_step(own: ModelTrainer, batch: Any) -> float:
    return own.step(batch)["tokens"]


class PlainTrainer:
    """A step as tutorials write it."""

    def __init__(self, folder: str, batch: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(local_device())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        rows = read_rows(batch)
        self._microbatches = list(pack(rows, Packing(TOKENS_PER_MICROBATCH)))
        self._num_tokens = sum(int(row.loss_mask.sum()) for row in rows)

    def step(self) -> float:
        for microbatch in self._microbatches:
            here = microbatch.to(self._model.device)
            with torch.autocast(self._model.device.type, torch.bfloat16):
                logits = self._model(here.padded_ids, use_cache=False).logits
            outputs = logits.flatten(0, 1)[here.owners[here.positions]].float().log_softmax(-1)
            logprobs = outputs.gather(1, here.targets[:, None])[:, 0]
            ((logprobs.detach() - logprobs).exp() * here.advantages).sum().div(self._num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._num_tokens


def handover(folder: str, vocab_size: int) -> dict[str, Any]:
    """Each way three times, the fastest."""
    batch = make_batch(grouped_rows(2, 2, vocabulary=vocab_size), logprob=-10.0)
    own = make_trainer(folder)
    own.step(batch)
    ours = made("torch", folder, {"max_running": 64, "context_length": 512}, dtype="bfloat16")
    ours.rest()
    to_rollout = []
    to_train = []
    loading = []
    for version in range(1, 4):
        to_rollout.append(seconds(own.model.rest) + seconds(lambda: awake(ours, WeightsRef(0, folder))))
        loading.append(seconds(lambda: awake(ours, WeightsRef(version, folder))))  # noqa: B023
        to_train.append(seconds(ours.rest) + seconds(own.model.wake))
    ours.close()
    names = ("to_rollout_s", "to_train_s", "load_version_s")
    return dict(zip(names, map(min, (to_rollout, to_train, loading)), strict=True))


def timed(step: Callable[[], float]) -> dict[str, float]:
    """The best of three steps after a first one, and the peak of all."""
    num_tokens = step()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    best = min(seconds(step) for _ in range(3))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"tokens_per_second": round(num_tokens / best), "peak_mb": round(peak / 2**20)}


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
