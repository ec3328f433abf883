"""Publish: see sf_core.stages.all_stages."""

from typing import Any

from prefect import task

from sf_core.stages import all_stages
from sf_core.stages.run import RunRef


@task(name="publish", task_run_name="publish-{iteration}")
def publish(run: RunRef, iteration: int) -> dict[str, Any]:
    """Hand the new weights to every engine. Runs on a `cpu` worker."""
    return all_stages.publish(run, iteration)
