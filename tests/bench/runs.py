"""Small run directories as stages leave them, without the processes of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sf_core.config import RunConfig
from storage.files import write_atomic
from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory
from storage.tables.schema import Trajectory, TurnSpan
from storage.tables.trajectories import write_trajectories


def configure(run: RunDirectory, **sections: Any) -> RunConfig:
    config = RunConfig.model_validate(
        {"run_id": run.run_id, "policy": {"hidden_size": 32, "num_layers": 1, "warmstart": None}} | sections
    )
    run.write_config(config)
    return config


_TIMES = {"started_at": 0.0, "finished_at": 0.0}
_SESSIONS: dict[str, Any] = {"reward_mean": 0.0, "sessions": 0, "failures": {}}
_LEAST: dict[str, dict[str, Any]] = {
    "rollout": _SESSIONS | {"groups": [], "rejected": {}, "max_lag": 0},
    "evaluate": _SESSIONS,
    "train": {"version": 1, "device": "cpu"},
}


def stage_data(stage: str, **told: Any) -> dict[str, Any]:
    """Data of a manifest: what is told, and what every manifest of the stage has."""
    return _TIMES | _LEAST.get(stage, {}) | told


def commit(run: RunDirectory, iteration: int | None, stage: str, **more: Any) -> None:
    known = {"run_id": run.run_id, "iteration": iteration, "stage": stage, "attempt": 1}
    data = stage_data(stage, **more.pop("data", {}))
    run.commit_manifest(Manifest(**known | more, data=data))


def conversation(messages: list[dict[str, Any]], given: int = 1, **changes: Any) -> Trajectory:
    """A row of one token per message; the policy wrote the assistant's after the first `given`."""
    sampled = np.array([i >= given and m["role"] == "assistant" for i, m in enumerate(messages)])
    engines = np.where(sampled, "r0", None)
    values = {
        "policy": "policy",
        "task_id": "t0",
        "environment": "calculator",
        "group_id": "g0",
        "session_id": "s0",
        "branch_id": "s0.b0",
        "parent_branch_id": None,
        "shared_prefix": 0,
        "token_ids": np.arange(len(messages), dtype=np.int32),
        "loss_mask": sampled,
        "logprobs": np.where(sampled, np.float32(-1), np.float32("nan")),
        "policy_versions": np.where(sampled, 0, -1).astype(np.int32),
        "turns": [
            TurnSpan(message["role"], i, i + 1, engine=engine)
            for i, (message, engine) in enumerate(zip(messages, engines, strict=True))
        ],
        "messages": json.dumps(messages),
        "reward": 0.5,
        "reward_parts": {"answer": 0.5},
        "status": "finished",
        "interruptions": 0,
        "started_at": 0.0,
        "finished_at": 1.0,
    }
    return Trajectory(**(values | changes))


def sample(run: RunDirectory, iteration: int, rows: list[Trajectory]) -> None:
    """Commit a rollout."""
    ref = write_trajectories(run, iteration, rows, "rollout-1", is_multimodal=any(row.images for row in rows))
    data = {"groups": [iteration], "rejected": {}, "failures": {}, "reward_mean": mean_reward(rows)}
    commit(run, iteration, "rollout", outputs=[ref], data=data)


def mean_reward(rows: list[Trajectory]) -> float:
    """Mean over the sessions, each with the reward of its first branch."""
    return float(np.mean(list({row.session_id: row.reward or 0.0 for row in reversed(rows)}.values())))


def pretend(run: RunDirectory, iterations: int, *, first: int = 0, finished: bool = True) -> None:
    """Make a run whose manifests and file names are real, but not its files."""
    for iteration in range(first, iterations):
        for stage in STAGES:
            commit(run, iteration, stage, data={"reward_mean": iteration / 10})
        version = iteration + 1
        write_atomic(f"{run.weights_dir(version)}/model.safetensors", b"w" * 100)
        for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
            write_atomic(f"{run.checkpoint_dir(version)}/{name}", b"c" * 100)
    write_atomic(f"{run.journal_dir}/{run.run_id}.journal", b"j" * 10)
    if finished:
        run.write_summary({"iterations": iterations})


def copy_run(run: RunDirectory, folder: Path) -> RunDirectory:
    """Copy of a run in the folder, for a test that changes it."""
    return RunDirectory(str(shutil.copytree(run.uri, folder / run.run_id)))


def group_row(number: int, scores: Sequence[float] = (), **changes: Any) -> dict[str, Any]:
    """A row of `outcomes`; each session sampled ten tokens."""
    row = {
        "group_id": f"run-1.g{number}",
        "number": number,
        "source": "sums",
        "task_index": number,
        "task_id": f"sums-{number}",
        "position": number + 1,
        "need": 4,
        "size": 4,
        "version": 0,
        "verdict": "sealed",
        "rewards": list(scores),
        "scores": list(scores),
        "tokens": [10] * len(scores),
        "statuses": ["finished"] * len(scores),
    }
    return row | changes
