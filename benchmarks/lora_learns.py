"""Tokens that adapters take to a held-out reward of 0.8 on the quickstart. Baseline in the same run: training
all weights.

Each arm runs configs/quickstart.yaml, whose learning rate is 0.001. `RANK:FACTOR` is an adapter of all linear
layers with alpha twice the rank, at FACTOR times that rate. The seed sets policy, tasks, factors and draws.

Predicted after one try of each with seed 7: at three times the rate rank 32 takes at most 1.4 times the
tokens of full training. At ten times it is as fast for eight iterations, loses what it learned, and does not
reach the goal; the layers are 128 wide, and an adapter's step grows with the rank and falls with the width.
Rank 1 at ten times is stable and takes more than twice the tokens.

    python -m benchmarks.lora_learns --seed 0 --seed 1 --seed 2
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.orchestration import run_flow
from benchmarks.recipes import CONFIGS, GOAL, measure
from sf_core.cli.stack.local import local_stack, start_services
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.config.yaml_file import merge_sections
from storage.run_directory import RunDirectory

FULL_RATE = 0.001


def main(
    arm: Annotated[list[str], typer.Option()] = ["32:3", "32:10", "1:10"],  # noqa: B006
    seed: Annotated[list[int], typer.Option()] = [0, 1, 2],  # noqa: B006
    iterations: int = 28,
    every: int = 4,
) -> None:
    arms: dict[str, dict[str, Any]] = {"full": {"learning_rate": FULL_RATE}}
    for name in arm:
        rank, factor = name.split(":")
        arms[name] = {"learning_rate": float(factor) * FULL_RATE, "lora": {"rank": int(rank)}}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env = {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(Path.cwd())}
        with local_stack(folder / "logs", env) as stack:
            services = start_services(stack, folder, RunConfig().cluster.workers)()
            env = {**stack.env, **services.addresses, "SF_CACHE_DIR": str(folder / "cache")}
            for number in seed:
                for name, train in arms.items():
                    own = {
                        "run_id": f"{name.replace(':', '-')}-{number}",
                        "seed": number,
                        "train": {"iterations": iterations, **train},
                        "evaluate": {"every": every},
                        "cluster": {"scheduler": services.scheduler},
                        "dataplane": {"url": services.dataplane},
                        "storage": {"root": str(folder)},
                    }
                    quickstart = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
                    config = validate_config(merge_sections(quickstart, own))
                    run_flow(config, folder, env)
                    found[name].append(measure(RunDirectory(config.run_dir), iterations))
    full = [run["tokens_to_goal"] for run in found["full"]]
    line = {
        name: {
            "runs": runs,
            "tokens_over_full": [
                round(run["tokens_to_goal"] / base, 2) if run["tokens_to_goal"] and base else None
                for run, base in zip(runs, full, strict=True)
            ],
        }
        for name, runs in found.items()
    }
    print(json.dumps({"goal": GOAL, "seeds": seed, **line}))


if __name__ == "__main__":
    typer.run(main)
