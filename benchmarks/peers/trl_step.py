"""An optimiser step of TRL's GRPOTrainer on given completions; runs inside TRL's environment.

    python -m benchmarks.peers.trl_step FOLDER MICRO_BATCH WARM_STEPS

FOLDER holds a model, its tokenizer and batch.json. Loop, loss, backward pass, clipping and AdamW are
GRPOTrainer's own; only the completions are given, padded to the longest as it pads those that it generates.
Prints one JSON line. What our side uses too imports nothing of TRL.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

THREADS = 2


class Meter:
    """Times steps, and watches the memory of this process above what it is when the model is loaded."""

    def __init__(self, tokens: int, loaded: int) -> None:
        self._tokens = tokens
        self._loaded = loaded
        self._seconds: list[float] = []
        self._highest = 0
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def begin(self) -> None:
        self._started = time.perf_counter()

    def end(self) -> None:
        self._seconds.append(time.perf_counter() - self._started)

    def line(self) -> dict[str, float]:
        """Speed of the best step but the first, and memory of all steps."""
        self._done.set()
        self._watcher.join()
        return {
            "tokens_per_second": round(self._tokens / min(self._seconds[1:]), 1),
            "peak_mb": round((self._highest - self._loaded) / 2**20, 1),
        }

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._highest = max(self._highest, resident_bytes())


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def main(folder: str, micro_batch: int, warm_steps: int) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(THREADS)
    batch = json.loads((Path(folder) / "batch.json").read_text(encoding="utf-8"))
    rows = batch["rows"]
    group_size = batch["group_size"]
    steps = warm_steps + 1
    given = _padded(rows)

    class GivenCompletions(GRPOTrainer):
        def _generate_and_score_completions(self, _: Any) -> dict[str, Any]:
            return dict(given)

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end()

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GivenCompletions(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=len(rows) // micro_batch,
                num_generations=group_size,
                max_steps=steps,
                beta=0.0,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["-"] * (len(rows) // group_size * steps)}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[Timed()],
        )
        meter = Meter(sum(len(row["completion"]) for row in rows), resident_bytes())
        trainer.train()
    print(json.dumps(meter.line()))


def _padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What GRPOTrainer makes of completions; prompts are of equal length."""

    def pad(part: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = [torch.tensor(row[part]) for row in rows]
        masks = [torch.ones_like(of_row) for of_row in ids]
        padded = (torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (ids, masks))
        return next(padded), next(padded)

    (prompt_ids, prompt_mask) = pad("prompt")
    (completion_ids, completion_mask) = pad("completion")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": completion_mask.sum(),
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
