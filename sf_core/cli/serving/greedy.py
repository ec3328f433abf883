"""Greedy answers of a run's policy to a few held-out tasks. The evaluations of a run sample as its training
does, so that which answers are shown depends on chance.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection

from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.import_path import module_environment, python_module
from sf_core.scheduling.cluster import scheduler_of
from sf_core.training.registry import trainer_kind
from storage.run_directory import RunDirectory

LONGEST_S = 60.0
"""Longest time that a command waits for the answers. With a small policy they take seconds."""


def has_greedy_answers(config: RunConfig) -> bool:
    """Whether greedy answers can be had here, and may differ from sampled ones. Judges, external agents,
    servers and workers of a cluster are not asked for them."""
    is_here = scheduler_of(config) is None and engine_kind(config).needs_torch
    asks_others = bool(config.environment.judges) or config.rollout.is_external
    return (
        is_here
        and trainer_kind(config).computes_weights
        and not asks_others
        and config.rollout.temperature > 0
    )


def ask_greedily(run: RunDirectory, version: int, task_ids: Collection[str]) -> str:
    """Have a version answer these held-out tasks in another process, which stores the answers. Returns why
    there are none; empty if there are."""
    command = python_module("sf_core.cli.serving.greedy_process", run.uri, str(version), *task_ids)
    try:
        done = subprocess.run(
            command,
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        return f"they took longer than {LONGEST_S:.0f} s"
    return "a session failed" if done.returncode else ""
