"""Finish: see sf_core.stages."""

from typing import Any

from prefect import task

from sf_core import stages
from sf_core.run import RunRef


@task(name="finish")
def finish(run: RunRef) -> dict[str, Any]:
    """Write the trained policy, the summary and the pictures. Runs on a `cpu` worker."""
    return stages.finish(run)
