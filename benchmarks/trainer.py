"""One optimiser step on a batch of completions of very different lengths: ours against TRL's GRPOTrainer.

About 20M parameters; 64 completions of 16 to 512 tokens (log-uniform) in groups of 4 after prompts of 64;
float32, two threads, each side in a process of its own. Ours is `Trainer.step` without reading the batch from
storage; TRL's is its own loop on the same completions (benchmarks/peers/trl_step.py), with micro-batches that
are doubled for as long as it gets faster. tokens_per_second counts completion tokens in the best warm step;
peak_mb is resident memory above that of the loaded model: gradients, AdamW's moments and what the step needs.
two_ranks: seconds of a warm step at the smaller vocabulary on two ranks of one thread each, sharded by FSDP2
and split by Megatron-core into two tensor-parallel parts, and on one rank of two threads.

With --prompts: 16 completions of half to all of `--sampled` tokens in groups of 8, after prompts of each of
these lengths, at the smaller vocabulary. Ours packs rows by their distinct tokens, as by default; `before` by
rows times the longest row, 8,192 tokens to a micro-batch, as before decision 071. computed_over_distinct
counts the tokens that go through the network over the distinct ones. After prompts of more than 4,096 tokens
TRL's micro-batches have one row: with two rows a step took the same six minutes.

    python -m benchmarks.trainer
    python -m benchmarks.trainer --prompts 128,2048,8192 --sampled 512
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
import typer
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import trl_side
from benchmarks.peers.trl_step import THREADS, Meter, resident_bytes
from benchmarks.results import ROOT
from sf_core.config import TrainConfig
from sf_core.config.train_config import PackingRule
from sf_core.models.builtin import make_tokenizer
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.ranks import Ranks
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from storage.tables.schema import PART, TURN
from tests.bench.training.gang import Member, Try
from tests.bench.training.model_contract import Setup

SIZES: dict[str, dict[str, Any]] = {
    "32k": dict(vocab_size=32_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=4),
    "151k": dict(vocab_size=151_936, hidden_size=128, intermediate_size=352, num_hidden_layers=2),
}
PROMPT_TOKENS = 64
GROUP_SIZE = 4
SHORTEST = 16
LONG_GROUP_SIZE = 8
LONG_GROUPS = 2
BEFORE = 8192
"""Tokens of a micro-batch before decision 071, padding included."""
ONE_ROW_ABOVE = 4096
"""Tokens of a prompt, above which TRL's micro-batches have one row."""


def main(
    sizes: str = "32k,151k",
    completions: int = 64,
    longest: int = 512,
    warm_steps: int = 2,
    micro_batches: str = "2,4,8,16",
    prompts: str = "",
    sampled: int = 512,
) -> None:
    if prompts:
        lengths = [int(prompt) for prompt in prompts.split(",")]
        lines = {f"prompt_{length}": after_prompt(length, sampled, warm_steps) for length in lengths}
        print(json.dumps({"sampled": sampled} | lines))
        return
    line: dict[str, Any] = {}
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make_model(folder, size)
            random = np.random.default_rng(0)
            drawn = np.exp(random.uniform(math.log(SHORTEST), math.log(longest), completions))
            lengths = drawn.round().astype(int).tolist()
            make_batch(folder, SIZES[size]["vocab_size"], PROMPT_TOKENS, lengths, GROUP_SIZE)
            if "two_ranks" not in line:
                line["two_ranks"] = on_two_ranks(folder, warm_steps)
            ours = run_ours(folder, warm_steps, "distinct")
            trl = run_trl(folder, warm_steps, micro_batches)
        line[size] = {
            "ours": ours,
            "trl": trl,
            "speed_ratio": round(ours["tokens_per_second"] / trl["tokens_per_second"], 2),
            "memory_ratio": round(ours["peak_mb"] / trl["peak_mb"], 3),
        }
    print(json.dumps(line))


def after_prompt(prompt: int, sampled: int, warm_steps: int) -> dict[str, Any]:
    """All sides on completions of this many tokens after prompts of this length."""
    random = np.random.default_rng(0)
    lengths = random.integers(sampled // 2, sampled + 1, LONG_GROUPS * LONG_GROUP_SIZE).tolist()
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, "32k")
        make_batch(folder, SIZES["32k"]["vocab_size"], prompt, lengths, LONG_GROUP_SIZE)
        ours, before = (run_ours(folder, warm_steps, rule) for rule in ("distinct", "padded"))
        trl = run_trl(folder, warm_steps, "1,2,4,8,16" if prompt <= ONE_ROW_ABOVE else "1")
    return {
        "ours": ours,
        "before": before,
        "trl": trl,
        "speed_ratio": round(ours["tokens_per_second"] / trl["tokens_per_second"], 2),
        "memory_ratio": round(ours["peak_mb"] / trl["peak_mb"], 3),
    }


def run_ours(folder: str, warm_steps: int, rule: str) -> dict[str, Any]:
    return run([sys.executable, "-m", "benchmarks.trainer", "--step", folder, str(warm_steps), rule])


def run_trl(folder: str, warm_steps: int, micro_batches: str) -> dict[str, Any]:
    """Figures of TRL with the number of rows per micro-batch that is fastest."""
    peer = [str(trl_side.ensure_venv()), "-m", "benchmarks.peers.trl_step", folder]
    trl: dict[str, Any] = {"tokens_per_second": 0.0}
    for micro in micro_batches.split(","):
        candidate = {**run([*peer, micro, str(warm_steps)]), "micro_batch": int(micro)}
        if candidate["tokens_per_second"] < trl["tokens_per_second"]:
            break  # larger ones pad more still
        trl = candidate
    return trl


def on_two_ranks(folder: str, warm_steps: int) -> dict[str, float]:
    layouts = {
        "one_rank": ("torch", 1, {}),
        "fsdp": ("torch", 2, {}),
        "megatron_tp2": ("megatron", 2, {"tensor_parallel": 2}),
    }
    members = [Member("t0"), Member("t1")]
    seconds = {}
    for number, (name, (backend, size, train)) in enumerate(layouts.items()):
        settings = {"policy": {"model": folder}, "train": {"backend": backend, "workers": size, **train}}
        setup = Setup(f"sf_core.training.{backend}.backend", folder, settings)
        one = Try(folder, tuple(member.worker for member in members[:size]), iteration=number, timeout_s=600)
        for member in members[:size]:
            member.sit(one, functools.partial(step_s, setup, THREADS // size, warm_steps))
        seconds[name], *_ = [member.report(timeout_s=3600) for member in members[:size]]
    for member in members:
        member.end()
    return seconds


def step_s(setup: Setup, threads: int, warm_steps: int, ranks: Ranks) -> float:
    """Seconds of the fastest warm step, on one of these ranks."""
    torch.set_num_threads(threads)
    given = json.loads((Path(setup.folder) / "batch.json").read_text(encoding="utf-8"))
    batch = as_table(given["rows"], given["group_size"])
    trainer = setup.trainer(ranks)
    return round(min([trainer.step(batch)["seconds"] for _ in range(warm_steps + 1)][1:]), 2)


def make_model(folder: str, size: str) -> None:
    torch.manual_seed(0)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    config = Qwen3Config(**SIZES[size], **heads, head_dim=SIZES[size]["hidden_size"] // 4)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    # it has fewer tokens, which nobody decodes; TRL wants one
    make_tokenizer().save_pretrained(folder)


def make_batch(
    folder: str, vocabulary: int, prompt_tokens: int, lengths: Sequence[int], group_size: int
) -> None:
    """Completions of these lengths, of which each group has its own prompt."""
    random = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(lengths):
        if number % group_size == 0:
            prompt = random.integers(vocabulary, size=prompt_tokens).tolist()
        completion = random.integers(vocabulary, size=length).tolist()
        rows.append({"prompt": prompt, "completion": completion, "advantage": float(random.normal())})
    (Path(folder) / "batch.json").write_text(
        json.dumps({"group_size": group_size, "rows": rows}), encoding="utf-8"
    )


def run(command: list[str]) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True, encoding="utf-8")
    line: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def step(folder: str, warm_steps: int, rule: PackingRule) -> None:
    """Our side, by this rule of packing."""
    torch.set_num_threads(THREADS)
    given = json.loads((Path(folder) / "batch.json").read_text(encoding="utf-8"))
    batch = as_table(given["rows"], given["group_size"])
    max_tokens = None if rule == "distinct" else BEFORE
    config = TrainConfig(packing=rule, tokens_per_microbatch=max_tokens)
    trainer = ModelTrainer(functools.partial(TorchModel, folder), config, seed=0)
    meter = Meter(sum(len(row["completion"]) for row in given["rows"]), resident_bytes())
    for _ in range(warm_steps + 1):
        meter.begin()
        trainer.step(batch)
        meter.end()
    rows = read_rows(batch)
    computed, distinct = (
        sum(len(microbatch.token_ids) for microbatch in pack(rows, packing))
        for packing in (Packing(max_tokens, rule), Packing(1 << 40))
    )
    print(json.dumps({**meter.line(), "computed_over_distinct": round(computed / distinct, 3)}))


def as_table(rows: list[dict[str, Any]], group_size: int) -> pa.Table:
    """The rows as a filter would have written them, sampled by the first version."""

    def per_token(before: Any, sampled: Any, kind: pa.DataType) -> pa.Array:
        lists = [[before] * len(row["prompt"]) + [sampled] * len(row["completion"]) for row in rows]
        return pa.array(lists, pa.list_(kind))

    ids = [row["prompt"] + row["completion"] for row in rows]
    turns = [[{"start": 0, "end": len(one), "temperature": 1.0, "top_p": 1.0, "top_k": 0}] for one in ids]
    advantages = [[row["advantage"]] * len(one) for row, one in zip(rows, ids, strict=True)]
    return pa.table(
        {
            "token_ids": pa.array(ids, pa.list_(pa.int32())),
            "loss_mask": per_token(False, True, pa.bool_()),
            "logprobs": per_token(None, -10.0, pa.float32()),
            "policy_versions": per_token(None, 0, pa.int32()),
            "advantages": pa.array(advantages, pa.list_(pa.float32())),
            "turns": pa.array(turns, pa.list_(TURN)),
            "weights": pa.nulls(len(rows), pa.list_(pa.float32())),
            "reward": [0.0] * len(rows),
            "reward_parts": pa.array([[]] * len(rows), pa.list_(PART)),
            "session_id": [f"s{number}" for number in range(len(rows))],
            "group_id": [f"g{number // group_size}" for number in range(len(rows))],
            "decision": ["train"] * len(rows),
        }
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step(sys.argv[2], int(sys.argv[3]), cast(PackingRule, sys.argv[4]))
    else:
        typer.run(main)
