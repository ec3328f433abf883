"""What a new version of the weights costs while engines serve: bytes and seconds of the full tensors and of
deltas, and how long the torch engine, and vLLM where `make vllm` has installed it, stand still. Prints one
JSON line.

    python -m benchmarks.weights [--size 1m] [--size 100m]

A trainer makes real steps of Adam at a learning rate of 1e-6 on matrices as large as those of trained models
(standard deviation 0.02), and publishes bfloat16. Figures are medians of the steps after the first. All reads
begin with the files out of the page cache.

standstill_s: longest time between two tokens around an update, less the median time, with 32 greedy requests
running whose KV is kept. paused_full: stepping stops while the file is read, parsed and made a decoder, which
is how engines loaded weights before they pulled them beside serving (not tried with vLLM, which sends
requests anew). pulled_full and pulled_delta: as engines do now. recompute_s: what the last of them takes
longer when the KV of running requests is computed anew."""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
import typer
from safetensors.torch import load
from transformers import AutoConfig
from transformers.utils import logging

from sf_core.config import PolicyConfig, RunConfig, TrainConfig
from sf_core.engines.host_weights import HostWeights
from sf_core.engines.protocol import Engine, StepEngine
from sf_core.engines.registry import make_engine
from sf_core.models.adapter import Adapter, list_linears, make_factors, shape_factors
from sf_core.models.builtin import make_policy
from sf_core.models.decoder import DecoderSpec, decoder_spec, fuse
from sf_core.models.projections import fastest
from sf_core.process.environment_variables import vllm_python
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake
from sf_core.training.policy_folder import read_model_config
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from sf_core.types import GenerationRequest, Sampling, WeightsRef
from storage.files import read_bytes
from storage.run_directory import RunDirectory
from storage.tables.batches import BATCH_SCHEMA
from storage.tensors.tensor_bytes import TensorBytes, parse
from storage.tensors.weight_delta import encode
from storage.tensors.weights import ADAPTER_CONFIG, has_weights, load_weights, save_adapter, save_weights

POLICIES = {
    "1m": PolicyConfig(dtype="bfloat16"),
    "100m": PolicyConfig(hidden_size=768, num_layers=12, dtype="bfloat16"),
}
STEPS = 6
LEARNING_RATE = 1e-6
SPREAD = 0.02
RUNNING = 32
PROMPT = 16
CONTEXT = 2048
SETTLING = 20
"""Steps before and after an update whose times count."""


def main(
    size: Annotated[list[str] | None, typer.Option(help="1m, 100m; both by default")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 2,
    folder: Annotated[str | None, typer.Option(help="On the storage to be measured.")] = None,
) -> None:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    line: dict[str, Any] = {"benchmark": "weights", "threads": threads, "learning_rate": LEARNING_RATE}
    for name in size or POLICIES:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            run = RunDirectory(str(Path(temporary) / "run"))
            publish_versions(run, POLICIES[name])
            line[name] = measure(run, POLICIES[name])
    print(json.dumps(line))


def publish_versions(run: RunDirectory, policy: PolicyConfig, adapter: Adapter | None = None) -> None:
    """Store a start folder and the versions that a trainer makes of it, or of an adapter."""
    store_start(run, policy, adapter)
    trainer = make_trainer(run, policy)
    for version in range(1, STEPS + 1):
        trainer.step(batch(version))
        trainer.save_weights(run.weights_dir(version), run.version_dir(version - 1))


def store_start(run: RunDirectory, policy: PolicyConfig, adapter: Adapter | None) -> None:
    """Store a start folder in the dtype of the policy, with an adapter in it if one is given."""
    make_policy(run.start_dir, policy, seed=0)
    weights = {name: scaled(tensor) for name, tensor in load_weights(run.start_dir).items()}
    save_weights(run.start_dir, weights, 0, policy.dtype_name)
    if adapter is not None:
        factors = make_factors(shape_factors(adapter, list_linears(read_model_config(run.start_dir))), seed=0)
        save_adapter(run.start_adapter_dir, factors, adapter.encode(run.start_dir), 0)


def make_trainer(run: RunDirectory, policy: PolicyConfig) -> ModelTrainer:
    """A trainer of the start folder's weights, or of its adapter if it has one."""
    adapter = run.start_adapter_dir if has_weights(run.start_adapter_dir) else None
    make_model = functools.partial(TorchModel, run.start_dir, dtype=policy.dtype_name, adapter=adapter)
    return ModelTrainer(
        make_model,
        TrainConfig(learning_rate=LEARNING_RATE),
        seed=0,
        dtype=policy.dtype_name,
        adapter=b"" if adapter is None else read_bytes(f"{adapter}/{ADAPTER_CONFIG}"),
    )


def scaled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (SPREAD / tensor.std()) if tensor.ndim > 1 else tensor


def measure(
    run: RunDirectory, policy: PolicyConfig, make: Callable[..., Engine] = make_engine
) -> dict[str, Any]:
    full = [os.path.getsize(weights_file(run, version)) for version in range(1, STEPS + 1)]
    delta = [
        os.path.getsize(f"{run.weights_dir(version)}/delta.safetensors") for version in range(1, STEPS + 1)
    ]
    ratios = [part / whole for part, whole in zip(delta, full, strict=True)]
    kept, recomputed = (
        {side: standstill(run, policy, side, kv, make) for side in sides}
        for kv, sides in (
            ("keep", ("paused_full", "pulled_full", "pulled_delta")),
            ("recompute", ("pulled_delta",)),
        )
    )
    standstills = {"torch": kept}
    if has_vllm():
        sides = ("pulled_full", "pulled_delta")
        standstills["vllm"] = {side: standstill(run, policy, side, "keep", make, "vllm") for side in sides}
    ratio = kept["paused_full"] / max(kept["pulled_delta"], 1e-6)
    return {
        "parameters": sum(tensor.numel() for tensor in load_weights(run.start_dir).values()),
        "full_bytes": full[-1],
        "delta_bytes": round(statistics.median(delta[1:])),
        "delta_ratio": round(statistics.median(ratios[1:]), 4),
        "delta_ratio_of_first_step": round(ratios[0], 4),
        "make_s": make_s(run),
        **pull_s(run),
        "standstill_s": {
            kind: {side: round(seconds, 4) for side, seconds in of_kind.items()}
            for kind, of_kind in standstills.items()
        },
        "standstill_ratio": {"torch": round(ratio, 1)},
        "recompute_s": round(max(0.0, recomputed["pulled_delta"] - kept["pulled_delta"]), 4),
    }


def has_vllm() -> bool:
    try:
        vllm_python()
    except FileNotFoundError:
        return False
    return True


def make_s(run: RunDirectory) -> float:
    """Seconds in which a trainer that has two versions in memory makes a delta of them."""
    versions = [stored(run, version) for version in range(STEPS + 1)]
    return median_s(lambda version: encode(versions[version - 1], versions[version], version))


def median_s(work: Callable[[int], object]) -> float:
    seconds = []
    for version in range(2, STEPS + 1):
        began = time.perf_counter()
        work(version)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds), 4)


def pull_s(run: RunDirectory) -> dict[str, float]:
    """Seconds in which an engine's host has a version, by all of its tensors and by the delta."""

    def newcomer(version: int) -> None:
        forget(run, version)
        host = HostWeights()
        host.fetch(WeightsRef(version, run.weights_dir(version)))
        host.close()

    host = HostWeights()
    host.fetch(WeightsRef(1, run.weights_dir(1)))

    def next_one(version: int) -> None:
        forget(run, version)
        host.fetch(WeightsRef(version, run.weights_dir(version)))

    seconds = {"pull_full_s": median_s(newcomer), "pull_delta_s": median_s(next_one)}
    host.close()
    return seconds


def standstill(
    run: RunDirectory,
    policy: PolicyConfig,
    side: str,
    kv_on_update: str,
    make: Callable[..., Engine],
    kind: str = "torch",
) -> float:
    """Median standstill over the updates after the first."""
    settings = {
        "kind": kind,
        "max_running": RUNNING,
        "context_length": CONTEXT,
        "kv_on_update": kv_on_update,
    }
    lora: dict[str, Any] = {"lora": {}} if has_weights(run.start_adapter_dir) else {}
    config = RunConfig.model_validate({"policy": policy, "engine": settings, "train": lora})
    engine = DrivenEngine(make(config, run.start_dir))
    awake(engine, WeightsRef(0, run.version_dir(0)))
    spec_of(run.start_dir)  # the first call takes its time
    update = {"paused_full": load_between_steps, "pulled_full": take_full, "pulled_delta": take_next}[side]
    found = []
    for version in range(1, STEPS + 1):
        forget(run, version)
        begin_requests(engine, version)
        gaps = gaps_around(engine, lambda: update(engine, run, version))  # noqa: B023
        engine.abort()
        found.append(max(gaps) - statistics.median(gaps))
    engine.close()
    return statistics.median(found[1:])


def gaps_around(engine: StepEngine, update: Callable[[], int]) -> list[float]:
    """Seconds between steps that sampled, around an update, which returns the version that ends it."""
    moments: list[float] = []

    def step() -> None:
        if engine.step():
            moments.append(time.perf_counter())
        assert engine.num_requests, "the requests ended before the update did"

    while len(moments) < SETTLING:
        step()
    wanted = update()
    while engine.version != wanted:
        step()
    end = len(moments) + SETTLING
    while len(moments) < end:
        step()
    return np.diff(moments[1:]).tolist()


def load_between_steps(engine: StepEngine, run: RunDirectory, version: int) -> int:
    """Make a decoder and use it for nothing: only its time counts."""
    with open(weights_file(run, version), "rb") as file:
        params = load(file.read())
    embedding = params["model.embed_tokens.weight"]
    fuse(params, spec_of(run.start_dir), fastest(embedding.dtype, embedding.device))
    assert engine.version is not None
    return engine.version


@functools.cache
def spec_of(start_dir: str) -> DecoderSpec:
    spec = decoder_spec(AutoConfig.from_pretrained(start_dir), CONTEXT)
    assert spec is not None
    return spec


def take_full(engine: StepEngine, run: RunDirectory, version: int) -> int:
    """Pull a version that lies in a folder without a delta."""
    folder = Path(run.path("full", str(version)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors").symlink_to(weights_file(run, version))
    engine.update_weights(WeightsRef(version, str(folder)))
    return version


def take_next(engine: StepEngine, run: RunDirectory, version: int) -> int:
    engine.update_weights(WeightsRef(version, run.weights_dir(version)))
    return version


def begin_requests(engine: StepEngine, version: int) -> None:
    for number in range(RUNNING):
        ids = [(7 * number + i) % 100 for i in range(PROMPT)]
        greedy = Sampling(temperature=0.0, seed=number)
        name = f"{version}.{number}"
        engine.submit(GenerationRequest(name, ids, 0, CONTEXT - PROMPT, (), greedy, stream=True))


def forget(run: RunDirectory, version: int) -> None:
    """Have the files of a version read from their disk."""
    for path in Path(run.weights_dir(version)).iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stored(run: RunDirectory, version: int) -> TensorBytes:
    return parse(run.uri, Path(weights_file(run, version)).read_bytes())


def weights_file(run: RunDirectory, version: int) -> str:
    return f"{run.version_dir(version)}/model.safetensors"


def batch(seed: int, *, rows: int = 8, tokens: int = 64) -> pa.Table:
    """Rows of one group, enough for a whole step of the optimiser."""
    random = np.random.default_rng(seed)
    mask = [i >= tokens // 2 for i in range(tokens)]
    turn = {"role": "assistant", "start": 0, "end": tokens, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return pa.Table.from_pylist(
        [
            {name: None for name in BATCH_SCHEMA.names}
            | {
                "group_id": "g0",
                "session_id": f"s{row}",
                "token_ids": random.integers(0, 100, tokens).tolist(),
                "loss_mask": mask,
                "logprobs": [-3.0 if sampled else None for sampled in mask],
                "policy_versions": [0 if sampled else None for sampled in mask],
                "turns": [turn],
                "reward": float(row),
                "reward_parts": [],
                "advantages": np.where(mask, random.normal(), 0.0).tolist(),
                "weights": [1.0] * len(mask),
                "decision": "train",
            }
            for row in range(rows)
        ],
        BATCH_SCHEMA,
    )


if __name__ == "__main__":
    typer.run(main)
