"""Measure a run's policy on the held-out tasks, with the same agents, data plane and engines as training."""

from __future__ import annotations

import sys
from typing import Any

from prefect import flow

from sf_core.config import RunConfig
from sf_core.run import Run, begin_attempt, open_config
from sf_core.scheduling.plan import make_plan, read_workers
from tasks.cluster import TaggedTaskRunner, result_of, scheduler_address, submit
from tasks.evaluate import evaluate as evaluate_task
from tasks.lease import Leases


@flow(name="evaluate", flow_run_name="{config.run_id}-evaluate", task_runner=TaggedTaskRunner())
def evaluate(config: RunConfig) -> dict[str, Any]:
    """Evaluate the newest published version of the run; returns mean rewards. Nothing is trained."""
    plan = make_plan(read_workers(scheduler_address()), config)
    run = begin_attempt(config)
    version = Run(run).register(evaluate_only=True).version
    with Leases(run, plan) as leases:
        leases.lend_trainers(version)
        measured = submit(evaluate_task, run, version)
        return result_of(measured, f"evaluation of version {version}", config.cluster.stage_timeout_s)


if __name__ == "__main__":
    evaluate(open_config(sys.argv[1]))
