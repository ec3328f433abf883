"""Train: see sf_core.stages."""

from typing import Any

from prefect import task

from sf_core import stages
from sf_core.run import RunRef


@task(name="train", task_run_name="train-{iteration}")
def train(run: RunRef, iteration: int) -> dict[str, Any]:
    """One optimiser step on the batch; writes the next weights and a checkpoint. Runs on a `train` worker."""
    return stages.train(run, iteration)
