"""Evaluate: see sf_core/stages/evaluate.py."""

from typing import Any

from prefect import task

from sf_core.stages import evaluate as stage
from sf_core.stages.run import RunRef


@task(name="evaluate", task_run_name="evaluate-{version}")
def evaluate(run: RunRef, version: int, num_tasks: int | None = None) -> dict[str, Any]:
    """Mean reward of a policy version on the held-out tasks. Runs on a `cpu` worker."""
    return stage.evaluate(run, version, num_tasks)
