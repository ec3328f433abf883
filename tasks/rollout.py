"""Rollout: see sf_core/stages/rollout.py."""

from typing import Any

from prefect import task

from sf_core.stages import rollout as stage
from sf_core.stages.run import RunRef


@task(name="rollout", task_run_name="rollout-{iteration}")
def rollout(run: RunRef, iteration: int) -> dict[str, Any]:
    """Wait until the batch of this iteration is full and seal its trajectories. Runs on a `cpu` worker."""
    return stage.rollout(run, iteration)
