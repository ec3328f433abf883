"""Makes version 0 of the policy: the user's model, or the built-in one with a cached warm start."""

from __future__ import annotations

from prefect import flow

from sf_core.cli.live import tell
from sf_core.config import RunConfig
from sf_core.stages.run import OpenRun, RunRef, begin_attempt
from sf_core.stages.start import check_start, start_fault
from sf_core.stages.stored_config import settled
from tasks.cluster import TaggedTaskRunner, crashing_without_scheduler, result_of, submit
from tasks.deployed import DeployedConfig
from tasks.identity import identified, run_name_with_flow
from tasks.interruption import freeing_workers, sending_logs
from tasks.stages import warmstart as warmstart_task


@flow(name="warmstart", flow_run_name=run_name_with_flow, task_runner=TaggedTaskRunner())
def warmstart(config: DeployedConfig) -> str:
    """Make version 0 of the run's policy; returns its Hugging Face folder."""
    with sending_logs():
        config = settled(identified(config))
        check_start(config, by_a_worker=True)
        run = begin_attempt(config)
        with crashing_without_scheduler(), freeing_workers(run):
            return start_policy(config, run)


def start_policy(config: RunConfig, run: RunRef) -> str:
    """Make version 0 in an attempt that has begun; returns its Hugging Face folder."""
    directory = OpenRun(run).directory
    if directory.read_manifest(None, "start") is None or start_fault(directory) is not None:
        tell(f"version 0 is made: {config.policy.model or 'the built-in policy, and its warm start'}")
        result_of(submit(warmstart_task, run), "the warm start", config.cluster.stage_timeout_s)
        tell("version 0 is there")
    return OpenRun(run).start_dir
