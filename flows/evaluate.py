"""Measures a run's policy on the held-out tasks, with the same agents, data plane and engines as training."""

from __future__ import annotations

import sys
from typing import Any

from prefect import flow

from sf_core.scheduling.cluster import await_plan
from sf_core.stages.evaluate import open_evaluation
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.run import OpenRun, begin_attempt, open_config
from tasks.cluster import TaggedTaskRunner, crash_without_scheduler, result_of, scheduler_address, submit
from tasks.deployed import EvaluateForm, run_name_with_flow
from tasks.interruption import free_workers_at_end, leave_to_successor, send_logs_at_end, take_over
from tasks.lease import Leases
from tasks.stages import evaluate as evaluate_task


@flow(name="evaluate", flow_run_name=run_name_with_flow, task_runner=TaggedTaskRunner())
def evaluate(config: EvaluateForm) -> dict[str, Any]:
    """Measure the newest published version of a stored run, as it was configured; returns mean rewards.

    Nothing is trained; only run_id, storage.root, evaluate.num_tasks and the addresses of `config` count."""
    with send_logs_at_end(), leave_to_successor():
        evaluation = open_evaluation(config)
        if evaluation.measured is not None:
            return evaluation.measured.data
        config = evaluation.config
        version = evaluation.version
        preflight(Facts(config, in_flow=True, splits=["holdout"]))
        plan = await_plan(scheduler_address(), config)
        take_over()
        run = begin_attempt(config, evaluate_only=True)
        OpenRun(run).register(evaluate_only=True)
        # before lend_trainers: trainers are lent only for work that is known to be left
        OpenRun(run).start_evaluation(version, config.evaluate.num_tasks)
        with crash_without_scheduler(), free_workers_at_end(run), Leases(run, plan) as leases:
            leases.lend_trainers(version)
            measured = submit(evaluate_task, run, version, config.evaluate.num_tasks)
            return result_of(measured, "the evaluation", config.cluster.stage_timeout_s)


if __name__ == "__main__":
    evaluate(open_config(sys.argv[1]))
