"""python -m tests.mutations [WORD ...]: tries the mutations of table.toml, or those with one of the words.

Exits with 1 if one is not caught, with 2 if the table does not fit the sources.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# read when torch is imported: a fork per core
os.environ["OMP_NUM_THREADS"] = "1"

from tests.mutations.runner import Runner, TableError, preload, read_table

ROOT = Path(__file__).parents[2]

HEAVY = (
    "hypothesis.stateful",
    "openai",
    "playwright.sync_api",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "safetensors.torch",
    "starlette.websockets",
    "tokenizers",
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "uvicorn",
    "websockets.sync.client",
)
"""Modules that take long to import."""

DEADLINE_S = 120.0


def main(words: list[str]) -> int:
    began = time.monotonic()
    table = read_table(Path(__file__).with_name("table.toml"))
    mutations = [m for m in table if not words or any(word in f"{m}" for word in words)]
    num_workers = len(os.sched_getaffinity(0))
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        preload(HEAVY)
        runner = Runner(ROOT, Path(folder), num_workers, DEADLINE_S)
        try:
            runner.check(mutations)
        except TableError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"as they are, all tests pass, after {time.monotonic() - began:.0f} s", flush=True)
        for mutation, result in runner.run(mutations):
            counts[result.verdict] += 1
            name = f"{mutation.function}: {mutation.wrong}"
            print(f"{result.verdict:<8} {result.seconds:6.1f} s  {name}", flush=True)
            if result.verdict == "BROKEN":
                print(result.output, flush=True)
    print(
        f"{counts.total()} mutations in {time.monotonic() - began:.0f} s: {counts['caught']} caught, "
        f"{counts['hung']} hung, {counts['SURVIVED']} survived, {counts['BROKEN']} could not be judged"
    )
    return 1 if counts["SURVIVED"] or counts["BROKEN"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
