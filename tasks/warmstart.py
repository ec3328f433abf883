"""Warmstart: see sf_core.stages."""

from typing import Any

from prefect import task

from sf_core import stages
from sf_core.run import RunRef


@task(name="warmstart")
def warmstart(run: RunRef) -> dict[str, Any]:
    """Put the policy that the run starts from into its directory. Runs on a `train` worker."""
    return stages.start(run)
