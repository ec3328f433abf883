"""Train: see sf_core/stages/train.py."""

from typing import Any

from prefect import task

from sf_core.stages import train as stage
from sf_core.stages.run import RunRef
from sf_core.training.gang import RankAssignment


@task(name="train", task_run_name="train-{iteration}.{seat.rank}")
def train(run: RunRef, iteration: int, seat: RankAssignment) -> dict[str, Any]:
    """One rank of the optimiser steps on the batch; rank 0 writes the next weights and a checkpoint. Runs on
    the seat's `train` worker."""
    return stage.train(run, iteration, seat)
