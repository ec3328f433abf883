"""Publish: see sf_core.stages."""

from typing import Any

from prefect import task

from sf_core import stages
from sf_core.run import RunRef


@task(name="publish", task_run_name="publish-{iteration}")
def publish(run: RunRef, iteration: int) -> dict[str, Any]:
    """Hand the new weights to every engine. Runs on a `cpu` worker."""
    return stages.publish(run, iteration)
