"""Filter: see sf_core/stages/filter.py."""

from typing import Any

from prefect import task

from sf_core.stages import filter as stage
from sf_core.stages.run import RunRef


@task(name="filter", task_run_name="filter-{iteration}")
def filter_(run: RunRef, iteration: int) -> dict[str, Any]:
    """Turn sealed trajectories into a batch with advantages. Runs on a `cpu` worker."""
    return stage.filter(run, iteration)
