"""Tokens that recipes take to a held-out reward of 0.8 on the quickstart. Baseline in the same run: the
recipe `grpo`, which has a penalty on the divergence from the start.

Each runs configs/quickstart.yaml with configs/recipes/NAME.yaml on top, and nothing tuned for either; the
seed sets policy, tasks and draws. Aims, written before the first run: every one reaches 0.8; `ppo`, whose
sessions are compared with a critic in the place of a group, takes at most twice grpo's tokens.

    python -m benchmarks.recipes --seed 0 --seed 1 --seed 2
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.orchestration import run_flow
from sf_core.cli.stack.local import Services, local_stack, start_services
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.config.yaml_file import merge_sections
from sf_core.reports.view import RunView
from storage.run_directory import RunDirectory
from storage.tables.metrics import read_metrics

CONFIGS = Path(__file__).parents[1] / "configs"
GOAL = 0.8


def main(
    recipe: Annotated[list[str], typer.Option()] = ["grpo", "ppo"],  # noqa: B006
    seed: Annotated[list[int], typer.Option()] = [0, 1, 2],  # noqa: B006
    iterations: int = 28,
    every: int = 4,
) -> None:
    arms = {
        name: yaml.safe_load((CONFIGS / f"recipes/{name}.yaml").read_text(encoding="utf-8"))
        for name in recipe
    }
    print(json.dumps(compare_arms(arms, seed, iterations, every)))


def compare_arms(
    arms: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    iterations: int,
    every: int,
    goal: float = GOAL,
) -> dict[str, Any]:
    """Run the quickstart with the settings of each arm on top, for each seed. Returns what `measure` says of
    the runs, and the tokens to the goal of each over those of the first arm."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env = {
            "PREFECT_HOME": str(folder / "prefect"),
            "PYTHONPATH": str(Path.cwd()),
            "SF_CACHE_DIR": str(folder / "cache"),
        }
        with local_stack(folder / "logs", env) as stack:
            services = start_services(stack, folder, RunConfig().cluster.workers)()
            env = {**stack.env, **services.addresses}
            for seed in seeds:
                for name, own in arms.items():
                    config = _config(f"{name}-{seed}", own, seed, iterations, every, folder, services)
                    run_flow(config, folder, env)
                    found[name].append(measure(RunDirectory(config.run_dir), iterations, goal))
    first = next(iter(arms))
    baseline = [run["tokens_to_goal"] for run in found[first]]
    line = {
        name: {
            "runs": runs,
            f"tokens_over_{first}": [
                round(run["tokens_to_goal"] / base, 2) if run["tokens_to_goal"] and base else None
                for run, base in zip(runs, baseline, strict=True)
            ],
        }
        for name, runs in found.items()
    }
    return {"goal": goal, "seeds": list(seeds)} | line


def measure(run: RunDirectory, iterations: int, goal: float = GOAL) -> dict[str, Any]:
    """Held-out rewards by version, and the number of trained tokens at which they first reach the goal, on
    the line between two evaluations; None if they do not."""
    steps = [read_metrics(run.metrics_file("train", i)) for i in range(iterations)]
    tokens = [0.0]
    for rows in steps:
        tokens.append(tokens[-1] + sum(row["tokens"] for row in rows))
    rewards = RunView(run).read_held_out(range(iterations + 1))
    reached = None
    before = 0
    low = rewards[0]
    for version, reward in sorted(rewards.items()):
        if reward >= goal:
            share = (goal - low) / (reward - low) if reward > low else 0.0
            reached = round(tokens[before] + share * (tokens[version] - tokens[before]))
            break
        before = version
        low = reward
    last = steps[-1][-1]
    return {
        "tokens_to_goal": reached,
        "held_out": {version: round(reward, 3) for version, reward in sorted(rewards.items())},
        "tokens": round(tokens[-1]),
        "entropy": round(last["entropy"], 3),
        "kl_reference": round(last.get("kl_reference", 0.0), 4),
        "explained_variance": round(last.get("explained_variance", 0.0), 3),
        **{name: round(last[name], 4) for name in ("teacher_kl",) if name in last},
    }


def _config(
    name: str,
    own: Mapping[str, Any],
    seed: int,
    iterations: int,
    every: int,
    folder: Path,
    services: Services,
) -> RunConfig:
    quickstart = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text(encoding="utf-8"))
    places = {
        "run_id": name,
        "seed": seed,
        "train": {"iterations": iterations},
        "evaluate": {"every": every},
        "cluster": {"scheduler": services.scheduler},
        "dataplane": {"url": services.dataplane},
        "storage": {"root": str(folder)},
    }
    return validate_config(merge_sections(merge_sections(quickstart, own), places))


if __name__ == "__main__":
    typer.run(main)
