"""What a JSON Schema costs an engine: the samples of a GRPO batch whose answers follow one, and the same
without, on the built-in engine and vLLM (`make vllm`, or `--side torch` without it). Prints one JSON line.

    python -m benchmarks.schemas

The network is random, of 10M parameters without its embedding; the byte-level tokenizer is trained on this
project's sources to `vocabulary` tokens. The schema is an object with a list that is never complete, so that
every answer has `max_tokens` on both sides, which alternate; the first round warms up, the best of the others
counts, in tokens per second of wall time. cost: the share of the speed that the schema takes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from benchmarks.engines import SIZES, Load, made
from sf_core.engines.protocol import StepEngine
from sf_core.testing.engines import drain

SIDES = ("torch", "vllm")
STOP = "<|end|>"
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "number"},
        "kind": {"enum": ["file", "folder"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": ITEM, "minItems": 1000}},
    "required": ["items"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
}


def main(
    side: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SIDES)}; all by default")] = None,
    vocabulary: int = 32_000,
    prompts: int = 8,
    samples: int = 16,
    max_tokens: int = 64,
    threads: int = 2,
    repeats: int = 6,
) -> None:
    torch.set_num_threads(threads)
    # the server's
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        num_tokens = write_tokenizer(Path(folder), vocabulary)
        shape = SIZES["10m"] | {"vocab_size": num_tokens}
        config = Qwen3Config(
            tie_word_embeddings=True, eos_token_id=None, max_position_embeddings=1024, **shape
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        load = Load(num_tokens, prompts, samples, 40, max_tokens, varied=False)
        settings = {"max_running": prompts * samples, "context_length": 40 + max_tokens}
        result: dict[str, Any] = {"threads": threads, "vocabulary": num_tokens, "at_once": prompts * samples}
        for name in side or SIDES:
            engine = made(name, folder, settings)
            result[name] = compare(engine, load, repeats)
            engine.close()
    print(json.dumps(result))


def write_tokenizer(folder: Path, vocabulary: int) -> int:
    """Returns the number of its tokens, which is smaller if the sources have not enough."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=[STOP], show_progress=False
    )
    tokenizer.train([str(path) for path in Path(__file__).parents[1].glob("[bdfst]*/**/*.[pm][yd]")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def compare(engine: StepEngine, load: Load, repeats: int) -> dict[str, float]:
    grammars = {"free": "", "schema": f"start: %json {json.dumps(SCHEMA)}"}
    times: dict[str, list[float]] = {name: [] for name in grammars}
    for _ in range(1 + repeats):
        for name, grammar in grammars.items():
            started = time.perf_counter()
            for request in load.requests():
                engine.submit(replace(request, grammar=grammar, stop_token_ids=(0,) if grammar else ()))
            assert sum(len(chunk.token_ids) for chunk in drain(engine)) == load.sampled
            times[name].append(time.perf_counter() - started)
    rate = {name: load.sampled / min(seconds[1:]) for name, seconds in times.items()}
    return {
        **{f"{name}_tokens_per_second": round(value) for name, value in rate.items()},
        "cost": round(1 - rate["schema"] / rate["free"], 3),
    }


if __name__ == "__main__":
    typer.run(main)
