"""Evaluations of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sf_core.config import RunConfig
from storage.files import write_atomic
from storage.run_directory import STAGES, RunDirectory
from storage.tables.trajectories import write_trajectories
from tests.bench.runs import commit, configure, conversation

BEFORE = {"a": [0.0], "b": [1.0], "c": [0.5]}
AFTER = {"a": [1.0], "b": [1.0], "c": [0.25]}


def trained(
    run: RunDirectory, measured: tuple[Rewards, Rewards] = (BEFORE, AFTER), **sections: Any
) -> RunConfig:
    """A run of two iterations that was measured before and after."""
    config = configure(run, train={"iterations": 2}, evaluate={"num_tasks": 3}, **sections)
    for iteration in range(2):
        for stage in STAGES:
            times = {"started_at": 10.0 * iteration, "finished_at": 10.0 * iteration + 5}
            commit(run, iteration, stage, data={"reward_mean": 0.25 + iteration / 4, **times})
    for version, rewards in zip((0, 2), measured, strict=True):
        if rewards:
            measure(run, rewards, version)
    write_atomic(f"{run.start_dir}/config.json", b'{"model_type": "qwen3"}')
    return config


Rewards = Mapping[str, Sequence[float | None]]


def measure(run: RunDirectory, rewards: Rewards, version: int = 0) -> None:
    """Commit an evaluation whose answers have these rewards, by task; None: it was not judged."""
    rows = [
        conversation(
            [
                {"role": "user", "content": f"ask {task}"},
                {"role": "assistant", "content": f"say {reward or 0:g}"},
            ],
            task_id=task,
            session_id=f"{run.run_id}.{version}.{task}.{i}",
            group_id=None,
            reward=reward,
        )
        for task, own in rewards.items()
        for i, reward in enumerate(own)
    ]
    ref = write_trajectories(run, version, rows, "evaluation-1", "evaluations")
    mean = float(np.mean([reward or 0 for own in rewards.values() for reward in own]))
    commit(run, version, "evaluate", outputs=[ref], data={"reward_mean": mean, "failures": {}})
