"""Trains an agent's policy: the RL loop. One iteration = rollout -> filter -> train -> publish.

Start it with `sf train CONFIG`, or deploy it to a Prefect server.
"""

from __future__ import annotations

import sys
from typing import Any

from prefect import flow

from flows.warmstart import start_policy
from sf_core.reports.export.trackers import Trackers
from sf_core.reports.log_lines import log_progress
from sf_core.scheduling.cluster import await_plan, read_workers
from sf_core.scheduling.plan import Plan
from sf_core.stages.preflight.checks import list_warnings, preflight
from sf_core.stages.preflight.facts import SPLITS, Facts
from sf_core.stages.preflight.sizes import PolicySizes, warn_of_rates
from sf_core.stages.preflight.stored_config import resolve_config
from sf_core.stages.run import OpenRun, RunRef, begin_attempt, open_config
from tasks.cluster import (
    TaggedTaskRunner,
    crash_without_scheduler,
    result_of,
    scheduler_address,
    submit,
    use_lean_settings,
)
from tasks.deployed import TrainForm, identify_run, run_name
from tasks.gang import Gang
from tasks.interruption import free_workers_at_end, leave_to_successor, send_logs_at_end, take_over
from tasks.lease import Leases
from tasks.page import Page
from tasks.stages import evaluate, filter_, finish, publish, rollout


@flow(name="train", flow_run_name=run_name, task_runner=TaggedTaskRunner())
def train(config: TrainForm) -> dict[str, Any]:
    """Run all iterations that are not committed yet; returns the summary of the run."""
    with send_logs_at_end(), leave_to_successor():
        config = resolve_config(identify_run(config))
        facts = Facts(config, in_flow=True, splits=SPLITS, writes=True)
        preflight(facts)
        plan = await_plan(scheduler_address(), config)
        facts.workers = read_workers(scheduler_address())
        preflight(facts)
        for sentence in list_warnings(facts):
            log_progress(sentence)
        take_over()
        run = begin_attempt(config)
        trackers = Trackers(OpenRun(run).directory, config)
        page = Page(run)
        # free_workers_at_end is innermost: a flow that ends frees the workers first
        with crash_without_scheduler(), use_lean_settings(), trackers, page, free_workers_at_end(run):
            start_policy(config, run, plan.trainers)
            for sentence in warn_of_rates(config, PolicySizes.of(config)) if facts.sizes is None else ():
                log_progress(sentence)
            OpenRun(run).register()
            if resumed := OpenRun(run).describe_resumption():
                log_progress(resumed)
            with Leases(run, plan) as leases:
                for number in OpenRun(run).iterations_left():
                    plan = leases.replan()
                    OpenRun(run).begin_evaluation(number)
                    iteration(run, plan, number, leases.lend_trainers(number))
                    trackers.send(number)
                    page.iteration_is_through(number)
                OpenRun(run).begin_evaluation(config.train.iterations)
                # an attempt with nothing left to train has not lent its trainers yet
                leases.lend_trainers(config.train.iterations)
                last = submit(evaluate, run, config.train.iterations)
                measured = result_of(last, "the last evaluation", config.cluster.stage_timeout_s)
                log_progress(f"held-out {measured['reward_mean']:.3f} at the end")
            return result_of(submit(finish, run), "the summary", config.cluster.stage_timeout_s)


@flow(name="iteration", flow_run_name="{run.run_id}-{number}", task_runner=TaggedTaskRunner())
def iteration(run: RunRef, plan: Plan, number: int, lent: list[tuple[str, str]]) -> None:
    """One iteration of the loop. Stages with a manifest are done and not submitted again."""
    with leave_to_successor():
        opened = OpenRun(run)
        todo = opened.list_pending_stages(number)
        patience_s = opened.config.cluster.stage_timeout_s
        batch = [submit(evaluate, run, number)] if opened.evaluation_due(number) else []
        if "rollout" in todo:
            batch.append(submit(rollout, run, number))
        if "filter" in todo:
            batch.append(submit(filter_, run, number, wait_for=batch))
        gang = Gang(run, number, plan.trainers if "train" in todo else ())
        trained = False
        while not trained:
            ranks = gang.submit(wait_for=batch)
            after = [*batch, *ranks[:1]]
            published = [submit(publish, run, number, wait_for=after)] if "publish" in todo else []
            for stage in batch:
                result_of(stage, f"batch {number}", patience_s)
            gang.revoke_first(lent)
            trained = gang.has_committed()
        # publish depends on rank 0, which may be lost with its worker after its commit
        if published and not gang.has_returned():
            published = [submit(publish, run, number)]
        for stage in published:
            result_of(stage, f"publishing of iteration {number}", patience_s)


if __name__ == "__main__":
    # imported by name: a flow of `__main__` would be sent with every task by value
    from flows.train import train as train_by_name

    train_by_name(open_config(sys.argv[1]))
