"""A pretrained model of 135 million parameters on this machine: tokens per second through generation and
training together, CPU per token and memory, ours and TRL's GRPOTrainer. Prints one JSON line.

    python -m benchmarks.real_model [--steps 5] [--trl-steps 3] [--engine vllm]

Both sides get the same folder (`sf model smollm2`), the prompts of configs/smollm2.yaml, its group size (16
prompts x 8 completions), up to 48 tokens, and all cores. Both compute in bfloat16 if the processor has
instructions for it (TRL by autocast, its weights in float32 as ours are), else in float32. Ours is `sf train
configs/smollm2.yaml` with everything that it starts, TRL one process with a thread per core, which takes less
memory than a process per core. TRL samples at temperature 1 and is rewarded for different tokens, as in
quickstart_vs_trl: its answers are longer, which favours it in tokens per second. The first two steps of TRL,
and the first and the last of ours, are not counted: ours then end as they begin, with a part of the next
batch sampled.

Predicted for two cores: 5 times TRL's tokens per second, and at most its memory. Both were
missed (docs/benchmarks.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import typer
from transformers import AutoTokenizer

from benchmarks import trl_side
from sf_core.config.yaml_file import load_config
from sf_core.environments.registry import environment_of
from sf_core.models.pretrained.published import folder_of
from sf_core.models.projections import fastest_dtype
from storage.run_directory import RunDirectory

CONFIG = "configs/smollm2.yaml"
EVERY_S = 1.0


@dataclass
class Usage:
    """What a command and all processes below it took so far, looked at every second."""

    peak_gb: float = 0.0
    """Largest sum of their proportional memory (PSS), in 10^9 bytes."""
    cpu_s: dict[int, float] = field(default_factory=dict)

    def look(self, process: psutil.Process) -> None:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                times = one.cpu_times()
                self.cpu_s[one.pid] = times.user + times.system
                total += one.memory_full_info().pss
            except psutil.Error:
                continue
        self.peak_gb = max(self.peak_gb, total / 1e9)

    @property
    def seconds(self) -> float:
        return sum(self.cpu_s.values())


@contextmanager
def watched(command: list[str], **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], Usage]]:
    """A command that runs, and what it takes. Raises SystemExit if it fails."""
    usage = Usage()
    is_over = threading.Event()
    with subprocess.Popen(command, stdout=sys.stderr, **options) as running:

        def watch() -> None:
            process = psutil.Process(running.pid)
            while not is_over.wait(EVERY_S):
                try:
                    usage.look(process)
                except psutil.Error:
                    # a process may come or go while it is looked at
                    continue

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        yield running, usage
        failed = running.wait()
        is_over.set()
        thread.join()
        if failed:
            raise SystemExit(f"{command} failed with {failed}")


def main(steps: int = 5, trl_steps: int = 3, engine: str = "torch") -> None:
    with tempfile.TemporaryDirectory() as temporary:
        ours = run_ours(Path(temporary), steps, engine)
        trl = run_trl(Path(temporary), trl_steps)
    line = {
        "cores": os.cpu_count(),
        "engine": engine,
        "dtype": fastest_dtype(),
        "tokens_per_second": round(ours["tokens_per_second"] / trl["tokens_per_second"], 2),
        "cpu_per_token": round(ours["cpu_s_per_1000_tokens"] / trl["cpu_s_per_1000_tokens"], 3),
        "peak_memory": round(ours["peak_gb"] / trl["peak_gb"], 3),
        "ours": ours,
        "trl": trl,
    }
    print(json.dumps(line))


def run_ours(folder: Path, steps: int, engine: str) -> dict[str, float]:
    settings = [f"storage.root={folder}", "run_id=real", f"train.iterations={steps}", f"engine.kind={engine}"]
    settings += ["evaluate.num_tasks=1", "evaluate.every=1000"]
    command = [sys.executable, "-m", "sf_core", "train", CONFIG]
    command += [word for setting in settings for word in ("--set", setting)]
    directory = RunDirectory(str(folder / "real"))
    with watched(command, env=os.environ | {"PREFECT_HOME": str(folder / "prefect")}) as (running, usage):
        marks = [_await_published(running, directory, number, usage) for number in (0, steps - 2)]
    (began, cpu_before), (ended, cpu_after) = marks
    rollouts = [directory.read_manifest(number, "rollout") for number in range(1, steps - 1)]
    tokens = sum(manifest.data["sampled_tokens"] for manifest in rollouts if manifest is not None)
    return _figures(tokens, ended - began, cpu_after - cpu_before, usage.peak_gb)


def _await_published(
    running: subprocess.Popen[bytes], directory: RunDirectory, number: int, usage: Usage
) -> tuple[float, float]:
    """Time and CPU seconds when an iteration is published."""
    while directory.read_manifest(number, "publish") is None:
        if running.poll() is not None:
            raise SystemExit("our run ended early")
        time.sleep(0.1)
    return time.time(), usage.seconds


def run_trl(folder: Path, steps: int) -> dict[str, float]:
    config = load_config(CONFIG)
    model = folder_of("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(model)
    environment = environment_of(config.environment)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": environment.tasks("train", index).prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for index in range(config.rollout.groups_per_batch * steps)
    ]
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    options = {
        "model": model,
        "prompts": folder / "texts.json",
        "out": folder / "trl.json",
        "steps": steps,
        "group-size": config.rollout.group_size,
        "prompts-per-step": config.rollout.groups_per_batch,
        "max-tokens": config.rollout.max_tokens,
        "micro-batch": 16,
        "cores": 1,
    }
    switches = ["--bf16"] if fastest_dtype() == "bfloat16" else []
    command = [str(trl_side.ensure_venv()), trl_side.__file__, "run"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with watched([*command, *switches]) as (_, usage):
        pass
    warm = json.loads((folder / "trl.json").read_text(encoding="utf-8"))["steps"][trl_side.WARMUP_STEPS :]
    tokens, wall_s, cpu_s = (
        sum(step[name] for step in warm) for name in ("completion_tokens", "wall_s", "cpu_s")
    )
    return _figures(tokens, wall_s, cpu_s, usage.peak_gb)


def _figures(tokens: float, wall_s: float, cpu_s: float, peak_gb: float) -> dict[str, float]:
    return {
        "tokens_per_second": round(tokens / wall_s, 1),
        "cpu_s_per_1000_tokens": round(1000 * cpu_s / tokens, 1),
        "peak_gb": round(peak_gb, 2),
        "tokens": int(tokens),
    }


if __name__ == "__main__":
    typer.run(main)
