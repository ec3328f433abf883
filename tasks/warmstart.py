"""Warmstart: see sf_core/stages/start.py."""

from typing import Any

from prefect import task

from sf_core.stages import start as stage
from sf_core.stages.run import RunRef


@task(name="warmstart")
def warmstart(run: RunRef) -> dict[str, Any]:
    """Put the policy that the run starts from into its directory. Runs on a `train` worker."""
    return stage.start(run)
