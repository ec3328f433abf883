"""Finish: see sf_core/stages/finish.py."""

from typing import Any

from prefect import task

from sf_core.stages import finish as stage
from sf_core.stages.run import RunRef


@task(name="finish")
def finish(run: RunRef) -> dict[str, Any]:
    """Write the trained policy, the summary and the pictures. Runs on a `cpu` worker."""
    return stage.finish(run)
