"""The peer side of quickstart_vs_trl: TRL's GRPOTrainer on the same model folder, prompts, cores and dtype.

Owns TRL's environment (`ensure_venv`), its settings and its measurement; knows nothing of our own stack, and
imports TRL only inside that environment.

Settings were compared by CPU seconds per step (wall seconds and load in brackets), 512 completions of 64
tokens after prompts of 64, on 2 cores shared with other work, never idle; the last step of one run each.

    one process per core, micro batch 16     1M: 13.3 (11.8, 4)    10M: not measured
    one process per core, micro batch 32     1M: 13.3 (15.8, 5)    10M: 78.4 (71.3, 5)
    one process per core, micro batch 64     1M: 12.9 (13.6, 5)    10M: 82.2 (62.8, 5)
    one process per core, micro batch 256    1M: 13.6 (10.7, 4)    10M: not measured
    one process, 2 threads, micro batch 32   1M: 15.1 (32.1, 5)    10M: not measured

The last line waits passively in OpenMP; spinning, the default, gave 8.1 s to 152 s at 1M as the load varied.
On one thread at 1M a static cache changed nothing and eager attention cost a tenth more. Continuous batching
did not finish two steps in 4 minutes. torch.compile was not measured to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VENV = Path(__file__).resolve().parents[1] / ".venvs" / "trl"
# torch first and alone: with this exact version pip finds the CPU build
TORCH = "torch==2.13.0"
TRL = (TORCH, "trl==1.16.*", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "psutil>=6")
WARMUP_STEPS = 2


def ensure_venv() -> Path:
    """Python of the environment that holds TRL; made on the first call (about a minute)."""
    python = VENV / "bin" / "python"
    marker = VENV / ".complete.json"
    wanted = json.dumps(TRL)
    if marker.exists() and marker.read_text(encoding="utf-8") == wanted:
        return python
    marker.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    for packages in ((TORCH,), TRL):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    # last, because the marker means that every package is installed
    marker.write_text(wanted, encoding="utf-8")
    return python


def launch(cores: int) -> int:
    """Repeat this command line as one data-parallel process per core, and wait for it."""
    python = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cores}"]
    # OpenMP reads its variables once, when torch is imported; threads that spin slow each other down
    threads = str(max(1, (os.cpu_count() or 1) // cores))
    env = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*python, *sys.argv], env=env).returncode


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train with GRPOTrainer as one of `options.cores` processes; the report covers all of them."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    given = json.loads(Path(options.prompts).read_text(encoding="utf-8"))
    prompts = [given[i % len(given)] for i in range(options.prompts_per_step * options.steps)]
    lengths = {prompt: len(tokenizer(prompt)["input_ids"]) for prompt in set(prompts)}
    meter = Meter()

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        meter.count(sum(lengths[prompt] for prompt in prompts), sum(map(len, completion_ids)))
        return [len(set(ids)) / options.max_tokens for ids in completion_ids]

    class MeterCallback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end_step()

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            reward_funcs=reward,
            args=grpo_config(options, scratch),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[MeterCallback()],
        )
        trainer.train()
    return summarise(meter.steps, options.cores)


def grpo_config(options: argparse.Namespace, output_dir: str) -> Any:
    """One generation of all completions and one update per step, in the fastest settings found."""
    from trl import GRPOConfig

    completions = options.prompts_per_step * options.group_size
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=options.bf16,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=completions // (options.micro_batch * options.cores),
        num_generations=options.group_size,
        max_completion_length=options.max_tokens,
        max_steps=options.steps,
        learning_rate=1e-5,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )


class Meter:
    """Records seconds, CPU seconds and tokens of steps, between ends of updates, over all processes."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def start(self) -> None:
        self._tokens = [0, 0]
        self._wall_s = time.perf_counter()
        self._cpu_s = cpu_seconds()

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        self._tokens = [prompt_tokens, completion_tokens]

    def end_step(self) -> None:
        import torch
        import torch.distributed as dist

        sums = torch.tensor([cpu_seconds() - self._cpu_s, *self._tokens], dtype=torch.float64)
        dist.all_reduce(sums)
        counted = dict(zip(("cpu_s", "prompt_tokens", "completion_tokens"), sums.tolist(), strict=True))
        self.steps.append({"wall_s": time.perf_counter() - self._wall_s, **counted})
        self.start()


def cpu_seconds() -> float:
    """User and system time of this process and its children so far."""
    import psutil

    process = psutil.Process()
    times = [process.cpu_times(), *(child.cpu_times() for child in process.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def summarise(steps: list[dict[str, float]], cores: int) -> dict[str, Any]:
    """Means over the warm steps. tokens_per_second: completion tokens over the whole step, training too."""
    warm = steps[WARMUP_STEPS:]
    mean = {name: sum(step[name] for step in warm) / len(warm) for name in warm[0]}
    return {
        "tokens_per_second": mean["completion_tokens"] / mean["wall_s"],
        "seconds_per_step": mean["wall_s"],
        "cpu_seconds_per_step": mean["cpu_s"],
        "tokens_per_step": mean["completion_tokens"],
        "prompt_tokens_per_step": mean["prompt_tokens"],
        "cores": cores,
        "load_1m": os.getloadavg()[0],
        "steps": steps,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with TRL and measure it, inside TRL's environment.")
    command = parser.add_subparsers(required=True).add_parser("run")
    command.add_argument("--model", required=True, help="Hugging Face folder")
    command.add_argument("--prompts", required=True, help="JSON list of prompts, already in chat format")
    defaults = {"steps": 6, "group-size": 16, "prompts-per-step": 32, "max-tokens": 64, "cores": 2}
    for name, default in {**defaults, "micro-batch": 32}.items():
        command.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    command.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    command.add_argument("--out", required=True, help="where the report is written as JSON")
    options = parser.parse_args()
    if options.steps <= WARMUP_STEPS:
        parser.error(f"--steps {options.steps}: expected more than the {WARMUP_STEPS} warm-up steps")
    return options


def main() -> None:
    options = parse()
    if "RANK" not in os.environ:
        raise SystemExit(launch(options.cores))
    report = run(options)
    if os.environ["RANK"] == "0":
        Path(options.out).write_text(json.dumps(report), encoding="utf-8")
        print(json.dumps(report))


if __name__ == "__main__":
    main()
