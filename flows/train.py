"""Train an agent's policy: the RL loop. One iteration = rollout -> filter -> train -> publish.

Start it with `sf train CONFIG`, or deploy it to a Prefect server.
"""

from __future__ import annotations

import sys
from typing import Any

from prefect import flow

from flows.warmstart import warmstart
from sf_core.config import RunConfig
from sf_core.run import Run, RunRef, begin_attempt, open_config
from sf_core.scheduling.plan import Plan, make_plan, read_workers
from tasks.cluster import TaggedTaskRunner, lane, lean_settings, result_of, scheduler_address
from tasks.evaluate import evaluate
from tasks.filter import filter_
from tasks.finish import finish
from tasks.lease import Leases
from tasks.page import show_devices
from tasks.publish import publish
from tasks.rollout import rollout
from tasks.train import train as train_step


@flow(name="train", flow_run_name="{config.run_id}", task_runner=TaggedTaskRunner())
def train(config: RunConfig) -> dict[str, Any]:
    """Run all iterations that are not committed yet; returns the summary of the run."""
    plan = make_plan(read_workers(scheduler_address()))
    run = begin_attempt(config)
    with lean_settings():
        warmstart(config, run)
        Run(run).register()
        with Leases(run, plan) as leases:
            for number in Run(run).iterations_left():
                iteration(config, run, plan, number, leases.lend_trainer(number))
            with lane("cpu"):
                last = evaluate.submit(run, config.train.iterations)
            result_of(last, "the last evaluation", config.cluster.stage_timeout_s)
        with lane("cpu"):
            return result_of(finish.submit(run), "the summary", config.cluster.stage_timeout_s)


@flow(name="iteration", flow_run_name="{run.run_id}-{number}", task_runner=TaggedTaskRunner())
def iteration(config: RunConfig, run: RunRef, plan: Plan, number: int, lent: str | None) -> None:
    """One iteration. Stages with a manifest are done and are not submitted again."""
    opened = Run(run)
    todo = opened.pending_stages(number)
    with lane("cpu"):
        stages = [evaluate.submit(run, number)] if opened.evaluation_due(number) else []
        if "rollout" in todo:
            stages.append(rollout.submit(run, number))
        if "filter" in todo:
            stages.append(filter_.submit(run, number, wait_for=stages))
    batch = list(stages)
    if "train" in todo:
        with lane("train", plan.trainer, priority=1):
            stages.append(train_step.submit(run, number, wait_for=stages))
    if "publish" in todo:
        with lane("cpu"):
            stages.append(publish.submit(run, number, wait_for=stages))
    for stage in batch:
        result_of(stage, f"batch {number}", config.cluster.stage_timeout_s)
    if "train" in todo and lent:
        # training is ahead of the next lease in the worker's queue: the device goes straight to it
        opened.dataplane.revoke(lent)
    show_devices(run, number)
    for stage in stages:
        result_of(stage, f"training and publishing of iteration {number}", config.cluster.stage_timeout_s)


if __name__ == "__main__":
    train(open_config(sys.argv[1]))
