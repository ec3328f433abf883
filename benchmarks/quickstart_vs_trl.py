"""Tokens per second of generation and training together, ours over TRL's GRPOTrainer, on this machine.

Both sides get the same model, prompts, group size (32 prompts x 16 completions), completion length (up to
64), dtype (float32) and two cores; warm steps only; ours with gateway, agents and orchestration included.
The two take turns, and the median pair counts.

With overlap much of a batch is sampled while the previous one is trained on. So the window ends with an
iteration that another one follows: tokens sampled before the window for its first batch are balanced by those
sampled in it for the batch after its last.

    python -m benchmarks.quickstart_vs_trl
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import typer
from transformers import AutoTokenizer

from benchmarks import trl_side
from sf_core.cli.stack.local import Services, local_stack, start_services
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import Process, Supervisor
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.environments.quickstart import tasks
from sf_core.models.builtin import make_policy
from storage.run_directory import RunDirectory
from storage.tables.metrics import read_metrics

SIZES = {"1m": {"hidden_size": 128, "num_layers": 4}, "10m": {"hidden_size": 384, "num_layers": 6}}
PROMPTS = 32
GROUP_SIZE = 16
MAX_TOKENS = 64
WARMUP = 3


def main(sizes: str = "1m,10m", steps: int = 9, trl_steps: int = 5, pairs: int = 3) -> None:
    """`steps` of ours: the first three and the last are not counted."""
    line: dict[str, Any] = {"prompts": PROMPTS, "group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS}
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make_policy(str(folder / "model"), RunConfig().policy.model_copy(update=SIZES[size]), seed=0)
            write_prompts(folder / "model", folder / "prompts.json")
            measured = [_pair(folder, number, steps, trl_steps) for number in range(pairs)]
        measured.sort(key=lambda pair: pair["ratio"])
        extremes = {"pairs": pairs, "ratio_min": measured[0]["ratio"], "ratio_max": measured[-1]["ratio"]}
        line[size] = measured[(pairs - 1) // 2] | extremes
    print(json.dumps(line))


def _pair(folder: Path, number: int, steps: int, trl_steps: int) -> dict[str, Any]:
    trl = run_trl(folder, trl_steps)
    place = folder / str(number)
    place.mkdir()
    ours = run_ours(place, folder, steps)
    ratio = round(ours["tokens_per_second"] / trl["tokens_per_second"], 3)
    return {"ratio": ratio, "ours": ours, "trl": trl}


def write_prompts(model: Path, file: Path) -> None:
    """The same prompts as text for TRL and as user messages for agents."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    items = []
    for index in range(PROMPTS):
        user = tasks("train", index).prompt
        messages = [{"role": "user", "content": user}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        items.append({"user": user, "text": text})
    file.write_text(json.dumps(items), encoding="utf-8")


def run_trl(folder: Path, steps: int) -> dict[str, Any]:
    texts = [item["text"] for item in json.loads((folder / "prompts.json").read_text(encoding="utf-8"))]
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    command = [str(trl_side.ensure_venv()), trl_side.__file__, "run", "--model", str(folder / "model")]
    command += [
        "--prompts",
        str(folder / "texts.json"),
        "--steps",
        str(steps),
        "--out",
        str(folder / "trl.json"),
    ]
    command += ["--group-size", str(GROUP_SIZE), "--prompts-per-step", str(PROMPTS)]
    subprocess.run([*command, "--max-tokens", str(MAX_TOKENS)], check=True, stdout=sys.stderr)
    result: dict[str, Any] = json.loads((folder / "trl.json").read_text(encoding="utf-8"))
    return result


def run_ours(folder: Path, given: Path, steps: int) -> dict[str, Any]:
    """Run our side in an empty folder; model and prompts are in `given`."""
    env = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PYTHONPATH": str(Path.cwd()),
        "SF_BENCHMARK_PROMPTS": str(given / "prompts.json"),
    }
    with local_stack(folder / "logs", env) as stack:
        services = start_services(stack, folder, RunConfig().cluster.workers)()
        config = our_config(folder, given / "model", services, steps)
        (folder / "flow.json").write_text(config.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "flows.train", str(folder / "flow.json")]
        [flow] = stack.start(Part("flow", command, {"PREFECT_API_URL": services.api}, once=True))
        directory = RunDirectory(config.run_dir)
        before = _wait(flow, directory, WARMUP - 1, stack)
        after = _wait(flow, directory, steps - 2, stack)
        if flow.wait(120) != 0:
            raise SystemExit(f"our run failed: {flow.tail(20)}")
    wall = after["time"] - before["time"]
    counted = range(WARMUP, steps - 1)
    rollouts = [directory.read_manifest(number, "rollout") for number in counted]
    tokens = sum(manifest.data["sampled_tokens"] for manifest in rollouts if manifest is not None)
    metrics = [read_metrics(directory.metrics_file("train", number))[0] for number in counted]
    training = sum(step["cpu_seconds"] for step in metrics)
    cpu = {part: round(after[part] - before[part], 2) for part in after if part != "time"}
    devices = cpu.pop("devices")
    return {
        "tokens_per_second": round(tokens / wall, 1),
        "seconds_per_step": round(wall / len(counted), 3),
        "tokens_per_step": round(tokens / len(counted)),
        "steps": len(counted),
        # both run in the trainer's worker
        "cpu_seconds": {"engine": round(devices - training, 2), "trainer": round(training, 2), **cpu},
        "max_lag": max(manifest.data["max_lag"] for manifest in rollouts if manifest is not None),
    }


def our_config(folder: Path, model: Path, services: Services, steps: int) -> RunConfig:
    return validate_config(
        {
            "run_id": "benchmark",
            "policy": {"model": str(model)},
            "environment": {part: f"benchmarks.single_turn:{part}" for part in ("tasks", "agent", "reward")},
            "rollout": {
                "group_size": GROUP_SIZE,
                "groups_per_batch": PROMPTS,
                "max_tokens": MAX_TOKENS,
                "concurrency": PROMPTS * GROUP_SIZE,
            },
            "train": {"iterations": steps, "learning_rate": 1e-5},
            "evaluate": {"every": 1000, "num_tasks": 1},
            "engine": {"max_running": PROMPTS * GROUP_SIZE // 2, "context_length": 192},
            "cluster": {"scheduler": services.scheduler},
            "dataplane": {"url": services.dataplane},
            "storage": {"root": str(folder / "runs")},
        }
    )


def _wait(flow: Process, directory: RunDirectory, number: int, stack: Supervisor) -> dict[str, float]:
    """Time and CPU seconds by part when an iteration is published."""
    while directory.read_manifest(number, "publish") is None:
        if flow.code() is not None:
            raise SystemExit(f"our run ended early: {flow.tail(20)}")
        time.sleep(0.02)
    return {"time": time.time(), **cpu_by_part(stack)}


PARTS = {"worker-r0": "devices", "worker-t0": "devices", "worker-a0": "agents", "dataplane": "gateway"}


def cpu_by_part(stack: Supervisor) -> dict[str, float]:
    """CPU seconds so far by part; every other process counts as orchestration."""
    seconds: dict[str, float] = defaultdict(float)
    for process in stack.processes.values():
        root = psutil.Process(process.pid())
        for member in [root, *root.children(recursive=True)]:
            times = member.cpu_times()
            seconds[PARTS.get(process.name, "orchestration")] += times.user + times.system
    return dict(seconds)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
