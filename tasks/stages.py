"""Prefect's tasks for the stages of a run, in the order in which they run. See sf_core/stages."""

from collections.abc import Sequence
from typing import Any

from prefect import task

import sf_core.stages.evaluate
import sf_core.stages.filter
import sf_core.stages.finish
import sf_core.stages.publish
import sf_core.stages.rollout
import sf_core.stages.start
import sf_core.stages.train
import sf_core.stages.warmstart
from sf_core.scheduling.worker_state import current_worker
from sf_core.stages.run import RunRef
from sf_core.training.gang import RankAssignment


@task(name="warmstart")
def warmstart(run: RunRef, *, warmed: bool = False, prompts: Sequence[str] = ()) -> dict[str, Any]:
    """Put the policy that the run starts from into its directory. Runs on a `train` worker, which may lack
    the environment that the prompts are of."""
    return sf_core.stages.start.start(run, warmed=warmed, prompts=prompts)


@task(name="demonstrate", task_run_name="demonstrate-{iteration}")
def demonstrate(run: RunRef, iteration: int) -> dict[str, Any]:
    """Write what the warm start of a model shows in this iteration. Runs on a `cpu` worker."""
    return sf_core.stages.warmstart.demonstrate(run, iteration)


@task(name="rollout", task_run_name="rollout-{iteration}")
def rollout(run: RunRef, iteration: int) -> dict[str, Any]:
    """Wait until the batch of this iteration is full and seal its trajectories. Runs on a `cpu` worker."""
    return sf_core.stages.rollout.rollout(run, iteration)


@task(name="filter", task_run_name="filter-{iteration}")
def filter_(run: RunRef, iteration: int) -> dict[str, Any]:
    """Turn sealed trajectories into a batch with advantages. Runs on a `cpu` worker."""
    return sf_core.stages.filter.filter(run, iteration)


@task(name="train", task_run_name="train-{iteration}.{assignment.rank}")
def train(run: RunRef, iteration: int, assignment: RankAssignment) -> dict[str, Any]:
    """One rank of the optimiser steps on the batch; rank 0 writes the next weights and a checkpoint. Runs on
    the `train` worker of the assignment."""
    return sf_core.stages.train.train(current_worker(), run, iteration, assignment)


@task(name="publish", task_run_name="publish-{iteration}")
def publish(run: RunRef, iteration: int) -> dict[str, Any]:
    """Hand the new weights to every engine. Runs on a `cpu` worker."""
    return sf_core.stages.publish.publish(run, iteration)


@task(name="evaluate", task_run_name="evaluate-{version}")
def evaluate(run: RunRef, version: int, num_tasks: int | None = None) -> dict[str, Any]:
    """Mean reward of a policy version on the held-out tasks. Runs on a `cpu` worker."""
    return sf_core.stages.evaluate.evaluate(run, version, num_tasks)


@task(name="finish")
def finish(run: RunRef) -> dict[str, Any]:
    """Write the trained policy, the summary and the pictures. Runs on a `cpu` worker."""
    return sf_core.stages.finish.finish(run)
