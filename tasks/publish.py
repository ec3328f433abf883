"""Publish: see sf_core/stages/publish.py."""

from typing import Any

from prefect import task

from sf_core.stages import publish as stage
from sf_core.stages.run import RunRef


@task(name="publish", task_run_name="publish-{iteration}")
def publish(run: RunRef, iteration: int) -> dict[str, Any]:
    """Hand the new weights to every engine. Runs on a `cpu` worker."""
    return stage.publish(run, iteration)
