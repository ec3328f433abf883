"""Tokens that a policy takes to a held-out reward of 0.75 on the quickstart with a teacher. Baseline in the
same run: rewards alone (GRPO with DAPO's token mean, the defaults).

Each arm runs configs/quickstart.yaml. The teacher is a version of a finished run of it, whose held-out reward
is about 0.89: `sf train quickstart --set run_id=teacher`, version 40. The seed of an arm sets its policy,
tasks and draws, and none is the teacher's.

Predicted before the first run, after one seed of a prototype. At equal tokens after 8 iterations: reverse
0.76, sampled 0.68, rewards alone 0.67. To 0.75: reverse takes 0.6 of the tokens of rewards alone, reverse
beside rewards the same as reverse, sampled 1.0, sampled beside rewards 0.9, and reverse with 256 groups of
one session 0.55.

    python -m benchmarks.teachers runs/teacher@40 --seed 1 --seed 2 --seed 3
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from benchmarks.recipes import compare_arms

GOAL = 0.75


def main(
    teacher: Annotated[str, typer.Argument(help="RUN@VERSION, or a model folder.")],
    arm: Annotated[list[str], typer.Option(help="By default all.")] = [],  # noqa: B006
    seed: Annotated[list[int], typer.Option()] = [1, 2, 3],  # noqa: B006
    iterations: int = 14,
    every: int = 2,
) -> None:
    arms = make_arms(os.path.abspath(teacher))
    chosen = {name: arms[name] for name in ("rewards", *(arm or arms))}
    print(json.dumps(compare_arms(chosen, seed, iterations, every, GOAL)))


def make_arms(teacher: str) -> dict[str, dict[str, Any]]:
    """Settings of each arm, the baseline first."""
    reverse, sampled = ({"model": teacher, "divergence": kind} for kind in ("reverse", "sampled"))
    return {
        "rewards": {},
        "reverse": {"train": {"advantage": "none", "teacher": reverse}},
        "sampled": {"train": {"advantage": "none", "teacher": sampled}},
        "reverse-and-rewards": {"train": {"teacher": reverse}},
        "sampled-and-rewards": {"train": {"teacher": sampled}},
        "reverse-single": {
            "rollout": {"group_size": 1, "groups_per_batch": 256},
            "train": {"advantage": "none", "teacher": reverse},
        },
    }


if __name__ == "__main__":
    typer.run(main)
