"""About how long a run takes on the CPUs of this machine, told before it begins."""

from __future__ import annotations

import os
import subprocess

from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.environments.registry import draw_tasks
from sf_core.process.import_path import module_environment, python_module
from sf_core.scheduling.cluster import scheduler_of, workers_here
from sf_core.scheduling.worker import MAX_THREADS
from sf_core.stages.preflight.sizes import PolicySizes

_ANSWERED_PART = 0.5
"""Part of `rollout.max_tokens` that an answer is assumed to have."""

_CHARACTERS = 3
"""Characters of a prompt per token, about."""

_SAMPLING_PART = 0.35
_TRAINING_PART = 0.48
"""Parts of the measured FLOP/s that sampling and training reach (benchmarks.real_model)."""

_SESSION_S = 0.005
_ITERATION_S = 1.0
_START_S = 30.0
"""Seconds of a session, an iteration and a start beside the products."""

_PROMPTS = 16
_PATIENCE_S = 60.0

_measured: dict[tuple[str, ...], float] = {}
"""FLOP/s of one core, by dtype, width and rows of the products."""


class Estimate:
    """Measures products of the policy's size, in a process of its own while others start."""

    def __init__(self, config: RunConfig, sizes: PolicySizes | None) -> None:
        self._sizes = sizes
        self._process: subprocess.Popen[str] | None = None
        self._products: tuple[str, ...] = ()
        if sizes is not None and _computes_here(config):
            self._products = (
                sizes.config.policy.dtype_name,
                f"{sizes.width}",
                f"{config.engine.max_running}",
            )
            if self._products not in _measured:
                self._process = subprocess.Popen(
                    python_module("sf_core.scheduling.probe", *self._products),
                    env=module_environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )

    def describe(self) -> str | None:
        """The estimate, as a sentence; None if nothing was measured."""
        if self._sizes is None or not self._products:
            return None
        if self._process is not None:
            try:
                told, _ = self._process.communicate(timeout=_PATIENCE_S)
                _measured[self._products] = float(told)
            except (subprocess.TimeoutExpired, ValueError):
                self._process.kill()
                return None
        return describe(self._sizes, _measured[self._products] * min(os.cpu_count() or 1, MAX_THREADS))


def describe(sizes: PolicySizes, flops: float) -> str:
    """The sentence for a machine with so many FLOP/s."""
    config = sizes.config
    answer = max(1, int(_ANSWERED_PART * config.rollout.turn_tokens))
    minutes = count_seconds(sizes, flops) / 60
    about = "less than a minute" if minutes < 1 else f"about {minutes:,.0f} min"
    iterations = config.train.iterations
    plural = "" if iterations == 1 else "s"
    return (
        f"{about} for {iterations} iteration{plural}, estimated from matrix products on this machine "
        f"({flops / 1e9:,.0f} GFLOP/s), for one answer of {answer} tokens per session"
    )


def count_seconds(sizes: PolicySizes, flops: float) -> float:
    """Seconds of the run at so many FLOP/s. Each product counts 2 FLOP per weight and token; the backward
    pass has two for each of the forward pass."""
    config = sizes.config
    rollout = config.rollout
    evaluate = config.evaluate
    iterations = config.train.iterations
    answer = _ANSWERED_PART * rollout.turn_tokens
    prompt = _prompt_tokens(config)
    groups = rollout.groups_per_batch
    sessions = groups * rollout.group_size
    per_token = 2.0 * sizes.parameters
    sampled = per_token * (groups * prompt + sessions * answer)
    trained = 3 * per_token * (groups * prompt + sessions * answer)
    held_out = per_token * evaluate.num_tasks * evaluate.answers * (prompt + answer)
    num_evaluations = 2 + (iterations - 1) // evaluate.every
    sampling = iterations * sampled + num_evaluations * held_out
    num_sessions = iterations * sessions + num_evaluations * evaluate.num_tasks * evaluate.answers
    return (
        sampling / (_SAMPLING_PART * flops)
        + iterations * trained / (_TRAINING_PART * flops)
        + num_sessions * _SESSION_S
        + iterations * _ITERATION_S
        + _START_S
    )


def _prompt_tokens(config: RunConfig) -> float:
    """Mean tokens of the first prompts, about; 0 of external agents, whose prompts nobody knows."""
    if config.rollout.is_external:
        return 0.0
    tasks = draw_tasks(config.environment, "train", range(_PROMPTS))
    return sum(len(str(task.prompt)) for task in tasks) / len(tasks) / _CHARACTERS


def _computes_here(config: RunConfig) -> bool:
    """Whether engines and trainers of the run are CPUs of this machine."""
    if scheduler_of(config) is not None or not engine_kind(config).runs_policy:
        return False
    return all(worker.device == "cpu" for worker in workers_here(config).values())
