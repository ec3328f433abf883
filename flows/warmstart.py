"""Makes version 0 of the policy: the user's model, or the built-in one, each perhaps after a warm start."""

from __future__ import annotations

from prefect import flow

from sf_core.config import RunConfig
from sf_core.reports.log_lines import log_progress
from sf_core.scheduling.cluster import await_plan
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.resolve import first_prompts
from sf_core.stages.preflight.start_folder import start_fault, warms_model
from sf_core.stages.preflight.stored_config import resolve_config
from sf_core.stages.run import OpenRun, RunRef, begin_attempt
from sf_core.stages.warmstart import begin_warmstart, iterations_left, remove_spare
from tasks.cluster import (
    TaggedTaskRunner,
    crash_without_scheduler,
    result_of,
    scheduler_address,
    submit,
)
from tasks.deployed import WarmstartForm, identify_run, run_name_with_flow
from tasks.gang import Gang
from tasks.interruption import free_workers_at_end, leave_to_successor, send_logs_at_end, take_over
from tasks.stages import demonstrate
from tasks.stages import warmstart as warmstart_task


@flow(name="warmstart", flow_run_name=run_name_with_flow, task_runner=TaggedTaskRunner())
def warmstart(config: WarmstartForm) -> str:
    """Make version 0 of the run's policy; returns its Hugging Face folder."""
    with send_logs_at_end(), leave_to_successor():
        config = resolve_config(identify_run(config))
        preflight(Facts(config, in_flow=True))
        trainers = await_plan(scheduler_address(), config).trainers if warms_model(config) else ()
        take_over()
        run = begin_attempt(config)
        with crash_without_scheduler(), free_workers_at_end(run):
            return start_policy(config, run, trainers)


def start_policy(config: RunConfig, run: RunRef, trainers: tuple[str, ...]) -> str:
    """Make version 0 in an attempt that has begun; returns its Hugging Face folder."""
    directory = OpenRun(run).directory
    warmed = warms_model(config)
    if directory.read_manifest(None, "start") is None or start_fault(directory) is not None:
        built_in = "the built-in policy" + (", and its warm start" if config.policy.warm_steps else "")
        log_progress(f"creating version 0: {config.policy.model or built_in}")
        if warmed:
            warm_up(config, run, trainers)
        made = submit(warmstart_task, run, warmed=warmed, prompts=first_prompts(config))
        result_of(made, "version 0", config.cluster.stage_timeout_s)
        log_progress("version 0 is ready")
    return OpenRun(run).directory.start_dir


def warm_up(config: RunConfig, run: RunRef, trainers: tuple[str, ...]) -> None:
    """Train the model on demonstrations, in a run of its own that the next step makes version 0 of."""
    patience_s = config.cluster.stage_timeout_s
    source = submit(warmstart_task, begin_warmstart(run))
    warm = begin_warmstart(run, result_of(source, "the model to warm up", patience_s)["parameters"])
    per_iteration = OpenRun(warm).config.train.minibatches
    steps = config.policy.warm_steps
    for number in iterations_left(warm):
        demonstrations = submit(demonstrate, warm, number)
        gang = Gang(warm, number, trainers)
        trained = False
        while not trained:
            gang.submit(wait_for=[demonstrations])
            result_of(demonstrations, f"demonstrations of iteration {number}", patience_s)
            trained = gang.has_committed()
        remove_spare(warm, number + 1)
        loss = OpenRun(warm).directory.read_committed(number, "train").data["loss"]
        log_progress(f"warm start: {(number + 1) * per_iteration} of {steps} steps, loss {loss:.3f}")
