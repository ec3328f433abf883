"""Tokens that adapters take to a held-out reward of 0.8 on the quickstart. Baseline in the same run: training
all weights.

Each arm runs configs/quickstart.yaml, whose learning rate is 0.001; adapters of all linear layers take ten
times that. The seed sets policy, tasks, factors and draws.

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
    rank: Annotated[list[int], typer.Option()] = [1, 32],  # noqa: B006
    seed: Annotated[list[int], typer.Option()] = [0, 1, 2],  # noqa: B006
    rate_factor: float = 10.0,
    iterations: int = 28,
    every: int = 4,
) -> None:
    arms: dict[str, dict[str, Any]] = {"full": {"learning_rate": FULL_RATE}}
    for number in rank:
        arms[f"rank {number}"] = {"learning_rate": rate_factor * FULL_RATE, "lora": {"rank": number}}
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
                        "run_id": f"{name.replace(' ', '')}-{number}",
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
    print(json.dumps({"goal": GOAL, "seeds": seed, "rate_factor": rate_factor, **line}))


if __name__ == "__main__":
    typer.run(main)
